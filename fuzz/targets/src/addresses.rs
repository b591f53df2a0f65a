//! Addresses of queue pairs: a peer's NIC tells its own, and it is connected to.

use kvik_host::verbs::QueueAddress;

/// What is taken is what the bytes say, all of them, and is an address that the library can be given.
pub fn address(data: &[u8]) {
    match QueueAddress::decode(data) {
        Ok(address) => {
            assert_eq!(address.encode(), data, "{address:?}");
            assert!((256..=4096).contains(&address.mtu()), "{address:?}");
            assert!(address.number > 1 && address.number >> 24 == 0, "{address:?}");
            assert!(address.first_packet >> 24 == 0, "{address:?}");
        }
        Err(error) => assert!(error.to_string().len() > 40, "{error}: says too little"),
    }
}
