//! How etcd is spoken to: by the variables that its own client `etcdctl` reads, so that what works there works here.

use kvik_core::{Code, Error, Result};
use reqwest::{Certificate, ClientBuilder, Identity};

/// Authorities that a server's certificate may be of, as a PEM file. Default: the system's.
const CACERT: &str = "ETCDCTL_CACERT";
/// The client's own certificate and key, as PEM files.
const CERT: &str = "ETCDCTL_CERT";
const KEY: &str = "ETCDCTL_KEY";
/// `NAME:PASSWORD`, or `NAME` with the password in the next one.
const USER: &str = "ETCDCTL_USER";
const PASSWORD: &str = "ETCDCTL_PASSWORD";

/// A user of etcd.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Login {
    pub name: String,
    pub password: String,
}

fn wrong(text: String) -> Error {
    Error::new(Code::InvalidArgument, text)
}

fn pem(variable: &str, path: &str) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| wrong(format!("{variable} names {path}, which is not read: {error}")))
}

/// A client with the certificates that the variables name. `variable` gives them.
///
/// # Errors
/// `InvalidArgument` for a file that is not read or is no certificate, and for a certificate without its key.
pub(super) fn with_certificates(
    mut builder: ClientBuilder,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<ClientBuilder> {
    if let Some(path) = variable(CACERT) {
        let read = Certificate::from_pem_bundle(&pem(CACERT, &path)?);
        let all = read.ok().filter(|all| !all.is_empty());
        let all = all.ok_or_else(|| wrong(format!("{CACERT} names {path}, which has no certificate")))?;
        builder = builder.tls_certs_only(all);
    }
    let (cert, key) = match (variable(CERT), variable(KEY)) {
        (None, None) => return Ok(builder),
        (Some(cert), Some(key)) => (cert, key),
        _ => return Err(wrong(format!("{CERT} and {KEY} are set together: a certificate and its key"))),
    };
    let both = [pem(CERT, &cert)?, b"\n".to_vec(), pem(KEY, &key)?].concat();
    let identity = Identity::from_pem(&both);
    let identity =
        identity.map_err(|_| wrong(format!("{cert} and {key} are no certificate and key in PEM")))?;
    Ok(builder.identity(identity))
}

/// The user that the variables name.
///
/// # Errors
/// `InvalidArgument` for a user without a password.
pub(super) fn login(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Login>> {
    let Some(user) = variable(USER) else { return Ok(None) };
    let (name, password) = match (user.split_once(':'), variable(PASSWORD)) {
        (_, Some(password)) => (user, password),
        (Some((name, password)), None) => (name.to_owned(), password.to_owned()),
        (None, None) => {
            return Err(wrong(format!("{USER} has no password: write NAME:PASSWORD, or set {PASSWORD}")));
        }
    };
    Ok(Some(Login { name, password }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set<'a>(all: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| all.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn a_user_is_written_as_for_etcdctl() {
        let named = |name: &str, password: &str| Login { name: name.into(), password: password.into() };
        assert!(login(set(&[])).unwrap().is_none());
        assert!(login(set(&[(USER, "a:b:c")])).unwrap() == Some(named("a", "b:c")));
        assert!(login(set(&[(USER, "a"), (PASSWORD, "b")])).unwrap() == Some(named("a", "b")));
        let error = login(set(&[(USER, "a")])).err().unwrap();
        assert_eq!(error.code, Code::InvalidArgument);
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        for (variables, text) in [
            (&[(CACERT, "/nowhere/ca.crt")][..], "/nowhere/ca.crt"),
            (&[(CACERT, "/dev/null")], "has no certificate"),
            (&[(CERT, "/dev/null")], KEY),
            (&[(CERT, "/dev/null"), (KEY, "/dev/null")], "no certificate and key"),
        ] {
            let error = with_certificates(ClientBuilder::new(), set(variables)).err().unwrap();
            assert!(error.code == Code::InvalidArgument && error.text.contains(text), "{error}");
        }
    }
}
