//! Facts of the machine: addresses, clocks, huge pages, who this process is, what the probes say; and what is said of
//! libraries and ports.

mod addr {
    use kvik_host::addr::*;

    #[test]
    fn loopback_is_listed_as_such() {
        let all = interface_addresses().unwrap();
        for address in &all {
            assert_eq!(address.loopback, address.ip.is_loopback(), "{address:?}");
            assert!(!address.interface.is_empty());
        }
    }

    #[test]
    fn only_addresses_that_mean_something_elsewhere_are_routable() {
        for yes in ["10.0.0.1", "192.0.2.2", "2001:db8::1", "fd00::2", "::ffff:10.0.0.1", "169.254.7.7"] {
            assert!(is_routable_off_host(yes.parse().unwrap()), "{yes}");
        }
        for no in [
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
        ] {
            assert!(!is_routable_off_host(no.parse().unwrap()), "{no}");
        }
    }
}

mod clock {
    use kvik_host::clock::*;
    use std::time::Duration;

    #[test]
    fn clocks_rise_and_work_is_charged_to_the_thread() {
        let (boot, thread, process) = (boottime(), thread_cpu(), process_cpu());
        let mut sum = 0u64;
        while thread_cpu() == thread {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(boottime() > boot);
        assert!(process_cpu() >= process);
        assert!(process_cpu() > Duration::ZERO);
    }
}

mod huge_pages {
    use kvik_host::huge_pages::*;

    fn facts(total: usize, available: usize) -> HugePageFacts {
        HugePageFacts { pools: vec![Pool { page_size: 2 << 20, total, available }], ..Default::default() }
    }

    #[test]
    fn no_pool_says_what_to_set() {
        assert!(facts(0, 0).choose(64 << 20).unwrap_err().contains("vm.nr_hugepages"));
        assert!(HugePageFacts::default().choose(64 << 20).unwrap_err().contains("vm.nr_hugepages"));
    }

    #[test]
    fn a_pool_with_room_is_chosen_and_a_full_one_is_not() {
        assert_eq!(facts(40, 32).choose(64 << 20).unwrap().page_size, 2 << 20);
        let why = facts(40, 31).choose(64 << 20).unwrap_err();
        assert!(why.contains("32 pages") && why.contains("31 are free"), "{why}");
    }

    #[test]
    fn little_memory_is_not_rounded_up_to_a_huge_page() {
        assert!(facts(40, 40).choose(3 << 20).unwrap_err().contains("too few"));
        assert!(facts(40, 40).choose(4 << 20).is_ok(), "a whole number of pages wastes nothing");
    }

    #[test]
    fn this_machine_can_be_read() {
        let facts = HugePageFacts::read();
        assert!(facts.pools.is_sorted_by(|a, b| a.page_size > b.page_size));
    }
}

mod identity {
    use kvik_host::HostFacts;

    #[test]
    fn this_process_is_local_to_itself() {
        let facts = HostFacts::read().unwrap();
        assert_eq!(facts, HostFacts::read().unwrap());
        assert_ne!(facts.boot_id, [0; 16]);
        assert_eq!(facts.why_not_local(&facts), None);
        assert_eq!(facts.why_not_process_vm(&facts), None);
    }

    #[test]
    fn each_difference_has_its_own_reason() {
        let own = HostFacts::read().unwrap();
        let differ = |change: fn(&mut HostFacts)| {
            let mut peer = own.clone();
            change(&mut peer);
            peer
        };
        let reasons = [
            own.why_not_local(&differ(|p| p.boot_id[3] ^= 1)),
            own.why_not_local(&differ(|p| p.net_namespace += 1)),
            own.why_not_local(&differ(|p| p.user_namespace += 1)),
            own.why_not_local(&differ(|p| p.uid += 1)),
            own.why_not_process_vm(&differ(|p| p.pid_namespace += 1)),
        ];
        for (i, reason) in reasons.iter().enumerate() {
            assert!(reason.is_some() && !reasons[..i].contains(reason), "{reasons:?}");
        }
        assert_eq!(own.why_not_local(&differ(|p| p.pid_namespace += 1)), None);
    }
}

mod probe {
    use kvik_host::Probes;

    #[test]
    fn every_probe_says_something() {
        let probes = Probes::run();
        for (i, probe) in probes.all.iter().enumerate() {
            assert!(!probe.value.is_empty() && !probe.reason.is_empty(), "{probe:?}");
            assert!(probes.all[..i].iter().all(|earlier| earlier.name != probe.name), "{probe:?}");
        }
        assert!(probes.get("memfd_sealing").unwrap().ok, "{:?}", probes.get("memfd_sealing"));
        assert!(probes.get("no_such_probe").is_none());
        assert!(probes.get("cuda").unwrap().ok, "{:?}", probes.get("cuda"));
    }
}

mod library {
    use kvik_host::cuda::LIBCUDA;
    use kvik_host::library::{Library, Wanted};
    use kvik_host::verbs::LIBIBVERBS;
    use std::path::Path;

    const NOWHERE: Wanted = Wanted {
        soname: "libkvik-no-such-library.so.1",
        folders: &["/opt/vendor/lib"],
        option: "--library",
        packages: "package-a or package-b",
        container: "mount nothing",
    };
    const LIBC: Wanted = Wanted { soname: "libc.so.6", folders: &[], ..NOWHERE };

    #[test]
    fn what_is_missing_is_named_with_every_place_and_what_to_do() {
        let error = Library::open(NOWHERE, None).unwrap_err().0;
        let words = ["libkvik-no-such-library.so.1", "/opt/vendor/lib/", "package-a", "--library", "mount"];
        for word in words {
            assert!(error.contains(word), "{word} in: {error}");
        }
        let error = Library::open(NOWHERE, Some(Path::new("/no/such/file.so"))).unwrap_err().0;
        assert!(error.contains("/no/such/file.so") && !error.contains("/opt/vendor/lib/"), "{error}");
    }

    #[test]
    fn a_copy_that_the_process_has_comes_before_all_else() {
        let library = Library::open(LIBC, Some(Path::new("/no/such/file.so"))).unwrap();
        assert!(library.path().is_absolute() && library.path().ends_with("libc.so.6"), "{library:?}");
    }

    #[test]
    fn a_host_without_libibverbs_is_told_what_to_do() {
        let wanted = Wanted { soname: "libkvik-no-such-verbs.so.1", ..LIBIBVERBS };
        let error = Library::open(wanted, None).unwrap_err().to_string();
        for word in ["ibverbs-providers", "KVIK_NIC_LIBRARY", "--device=/dev/infiniband", "memlock"] {
            assert!(error.contains(word), "{word} in: {error}");
        }
    }

    #[test]
    fn a_host_without_the_driver_is_told_what_to_do() {
        let wanted = Wanted { soname: "libkvik-no-such-cuda.so.1", ..LIBCUDA };
        let error = Library::open(wanted, None).unwrap_err().to_string();
        for word in ["libkvik-no-such-cuda.so.1", "libcuda1", "nvidia-container-toolkit", "compute,utility"] {
            assert!(error.contains(word), "{word} in: {error}");
        }
    }
}

mod ports {
    use kvik_host::verbs::{Link, Port, PortState, rank};

    fn port(device: &str, state: PortState, gigabits: u32) -> Port {
        let (link, gids) = (Link::Ethernet, Vec::new());
        Port { device: device.into(), number: 1, state, link, mtu: 1024, longest: 1, lid: 0, gigabits, gids }
    }

    #[test]
    fn ports_in_use_and_fast_ones_come_first() {
        let mut ports = [
            port("down", PortState::Down, 400),
            port("slow", PortState::Active, 25),
            port("fast", PortState::Active, 200),
            port("fast too", PortState::Active, 200),
            port("waiting", PortState::Waiting, 800),
        ];
        rank(&mut ports);
        let names: Vec<&str> = ports.iter().map(|port| port.device.as_str()).collect();
        assert_eq!(names, ["fast", "fast too", "slow", "waiting", "down"]);
    }

    #[test]
    fn a_port_without_gids_says_which_it_is() {
        let error = port("rxe0", PortState::Active, 1).choose_gid(None).unwrap_err();
        assert!(error.to_string().contains("device rxe0 port 1"), "{error}");
    }
}
