//! `kvik-gpu-check`, which is for machines with a GPU, over the stand-in: every part of it, and that it can fail.

#[path = "../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
#[path = "../../../tests/standins/cuda/standin.rs"]
#[allow(dead_code)]
mod standin;

use standin::{path, text};
use std::process::{Command, Output};

/// What it says, and its status.
fn check(settings: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvik-gpu-check"));
    let (name, value) = path();
    command.args(["--mib", "1", "--rounds", "2"]).env(name, value).envs(settings.iter().copied());
    let output: Output = command.output().unwrap();
    (output.status.code(), text(&output))
}

#[test]
fn every_part_is_well_on_devices_that_are() {
    let (status, said) = check(&[("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0")]);
    assert_eq!(status, Some(0), "{said}");
    for words in ["driver for CUDA 12.8", "2 device(s)", "device 1: Stand-in 1", "all is well"] {
        assert!(said.contains(words), "{words} in: {said}");
    }
    assert_eq!(said.matches("\n  ok   ").count(), 2 * 14, "{said}");
    for words in
        ["another process reads it\n", "exported, blocking copies finish first", "pages of 128 KiB, kernel"]
    {
        assert_eq!(said.matches(words).count(), if words.starts_with("pages") { 6 } else { 2 }, "{said}");
    }
}

#[test]
fn what_a_machine_does_not_have_is_said_and_is_not_wrong() {
    let faults = "delay micros=0;attribute id=124 value=0;attribute id=117 value=0";
    let (status, said) = check(&[("KVIK_STANDIN_CUDA_DEVICES", "1"), ("KVIK_STANDIN_CUDA_FAULTS", faults)]);
    assert_eq!(status, Some(0), "{said}");
    assert_eq!(said.matches("\n  not  ").count(), 2, "{said}");
    for words in ["there is no other one", "open kernel modules", "neither orders them nor flushes"] {
        assert!(said.contains(words), "{words} in: {said}");
    }
}

#[test]
fn one_wrong_byte_and_one_failed_call_are_seen() {
    for (fault, words) in [
        ("flip nth=5", "bytes are wrong, the first at"),
        ("flip nth=17", "pieces by the kernel, to the host and back: seed 40: 1 of"),
        ("fail cuMemcpy2DAsync_v2 nth=2 code=1", "CUDA_ERROR_INVALID_VALUE"),
        ("fail cuIpcGetMemHandle nth=1 code=999", "CUDA_ERROR_UNKNOWN"),
        ("fail cuDevicePrimaryCtxRetain nth=1 code=2", "CUDA_ERROR_OUT_OF_MEMORY"),
    ] {
        let faults = format!("delay micros=0;{fault}");
        let (status, said) = check(&[("KVIK_STANDIN_CUDA_FAULTS", &faults)]);
        let expected = if fault.contains("Ipc") { Some(0) } else { Some(1) };
        assert!(status == expected && said.contains(words), "{fault}: {status:?}, {said}");
        assert_eq!(said.contains("WRONG"), status == Some(1), "{fault}: {said}");
    }
}

#[test]
fn without_a_gpu_it_says_so_with_a_status_of_its_own() {
    let (status, said) = check(&[("KVIK_STANDIN_CUDA_DEVICES", "0")]);
    assert!(status == Some(77) && said.starts_with("no GPU to check here: "), "{status:?}, {said}");
    assert!(said.contains("NO_DEVICE") && said.contains("--gpus all"), "{said}");
    let (status, said) = check(&[("KVIK_STANDIN_CUDA_VERSION", "11020")]);
    assert!(status == Some(77) && said.contains("470"), "{status:?}, {said}");
}
