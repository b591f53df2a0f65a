#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvik_fuzz_targets::run("message", data));
