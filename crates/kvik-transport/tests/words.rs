//! The words for transports and NICs, as options, reports and metrics have them.

use kvik_core::Code;
use kvik_transport::TransportId;
use kvik_transport::nics::{NicKind, NicOptions};

#[test]
fn each_transport_has_a_word_of_its_own() {
    let all = [
        TransportId::Own,
        TransportId::Local,
        TransportId::Libfabric,
        TransportId::Verbs,
        TransportId::Plugin,
        TransportId::Tcp,
    ];
    let mut names: Vec<String> = all.iter().map(TransportId::to_string).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all.len());
    assert_eq!(all.iter().filter(|id| id.is_rma()).count(), 3);
}

#[test]
fn texts_name_nics_and_are_given_back() {
    for text in [
        "efa",
        "efa:rdmap0s0-rdm",
        "libfabric:tcp",
        "libfabric:verbs:mlx5_0,mlx5_1",
        "verbs",
        "verbs:mlx5_0@3,mlx5_1/2",
        "plugin",
        "plugin:npu0,npu@1:2",
    ] {
        let options: NicOptions = text.parse().unwrap();
        assert_eq!(options.to_string(), text);
    }
    let options: NicOptions = "libfabric:tcp;ofi_rxm:eth0".parse().unwrap();
    assert_eq!(options.kind, NicKind::Libfabric("tcp;ofi_rxm".into()));
    assert_eq!(options.devices, ["eth0"]);
    for text in
        ["", "tcp", "libfabric", "libfabric:", "efa:", "efa:a,,b", "EFA", "verbs:a@x", "verbs:@1", "plugin:"]
    {
        let error = text.parse::<NicOptions>().unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.text.contains("libfabric:PROVIDER"), "{error}");
    }
}

#[test]
fn all_is_every_nic_and_near_is_for_ranks() {
    for (text, plain) in [
        ("efa:all", "efa"),
        ("verbs:all", "verbs"),
        ("libfabric:tcp:all", "libfabric:tcp"),
        ("plugin:all", "plugin"),
    ] {
        assert_eq!(text.parse::<NicOptions>().unwrap(), plain.parse().unwrap());
    }
    for text in ["efa:near", "verbs:near", "libfabric:efa:near", "plugin:near"] {
        let error = text.parse::<NicOptions>().unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.text.contains("kvik doctor"), "{error}");
    }
}
