//! From an address to an object store, with credentials from the environment.

use super::options::Bucket;
use kvik_core::{Code, Error, Result};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use std::sync::Arc;

/// An object store, the prefix of all names in it, and what it is called in texts.
pub(super) type Connected = (Arc<dyn ObjectStore>, Path, String);

fn wrong(text: String) -> Error {
    Error::new(Code::InvalidArgument, text)
}

/// Nothing is asked of the store yet: it may be away, and come back.
///
/// # Errors
/// `InvalidArgument` for an address that is none, or of a kind that this build does not know; `StorageFailed` for a folder
/// that cannot be made.
pub(super) fn connect(bucket: &Bucket) -> Result<Connected> {
    let url = match bucket {
        Bucket::Store(store, prefix) => {
            let path = Path::parse(prefix).map_err(|error| wrong(error.to_string()))?;
            return Ok((store.clone(), path, format!("{store}/{prefix}")));
        }
        Bucket::Url(url) => url,
    };
    let known = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER";
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(wrong(format!("{url:?} is no address of an object store: give {known}")));
    };
    // It may have a password in it, so it is not repeated.
    if rest.contains(['@', '?', '#']) || rest.chars().any(char::is_control) {
        let text = "the address of an object store has no user, query or fragment: credentials and endpoints come from the \
                    environment (AWS_*, GOOGLE_*, AZURE_*)";
        return Err(wrong(text.into()));
    }
    let (host, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let path = Path::parse(prefix).map_err(|error| wrong(format!("the prefix of {url}: {error}")))?;
    if scheme == "file" {
        if !host.is_empty() || prefix.is_empty() {
            return Err(wrong(format!("{url} names no folder: give file:///FOLDER")));
        }
        return Ok((local(&format!("/{prefix}"))?, Path::default(), url.clone()));
    }
    if host.is_empty() {
        return Err(wrong(format!("{url} names no bucket: give {known}")));
    }
    Ok((cloud(scheme, host, url, known)?, path, url.clone()))
}

fn local(folder: &str) -> Result<Arc<dyn ObjectStore>> {
    let failed = |error: String| {
        Error::new(Code::StorageFailed, format!("opening the object store in {folder}: {error}"))
    };
    std::fs::create_dir_all(folder).map_err(|error| failed(error.to_string()))?;
    let store = LocalFileSystem::new_with_prefix(folder).map_err(|error| failed(error.to_string()))?;
    Ok(Arc::new(store.with_automatic_cleanup(false)))
}

#[cfg(feature = "cloud")]
fn cloud(scheme: &str, host: &str, url: &str, known: &str) -> Result<Arc<dyn ObjectStore>> {
    use object_store::aws::AmazonS3Builder;
    use object_store::azure::MicrosoftAzureBuilder;
    use object_store::gcp::GoogleCloudStorageBuilder;
    use object_store::{BackoffConfig, ClientOptions, RetryConfig};
    use std::time::Duration;

    // The provider that kvik has anyway; one that the process has chosen before stays.
    drop(rustls::crypto::ring::default_provider().install_default());
    // Each request has a limit of its own here, and what fails is tried again behind the breaker.
    let retry = RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: 1,
        retry_timeout: Duration::from_secs(10),
    };
    let client =
        ClientOptions::new().with_connect_timeout(Duration::from_secs(3)).with_timeout(super::upload::LIMIT);
    let failed =
        |error: object_store::Error| wrong(format!("the object store at {url} cannot be used: {error}"));
    Ok(match scheme {
        "s3" => {
            // An endpoint without TLS is one that its user has named.
            let mut endpoints = std::env::vars_os().filter_map(|(name, value)| {
                name.to_str()?.starts_with("AWS_ENDPOINT").then(|| value.into_string().ok()).flatten()
            });
            let plain = endpoints.any(|endpoint| endpoint.starts_with("http://"));
            let builder = AmazonS3Builder::from_env().with_bucket_name(host).with_retry(retry);
            let client = client.with_allow_http(plain);
            Arc::new(builder.with_client_options(client).build().map_err(failed)?)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(host).with_retry(retry);
            Arc::new(builder.with_client_options(client).build().map_err(failed)?)
        }
        "az" => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(host).with_retry(retry);
            Arc::new(builder.with_client_options(client).build().map_err(failed)?)
        }
        _ => return Err(wrong(format!("{url} is of no kind that kvik knows: give {known}"))),
    })
}

#[cfg(not(feature = "cloud"))]
fn cloud(_scheme: &str, _host: &str, url: &str, _known: &str) -> Result<Arc<dyn ObjectStore>> {
    Err(wrong(format!(
        "{url}: this build of kvik was made without clouds: give file:///FOLDER, or take the wheel"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_address_is_refused_without_repeating_a_password() {
        for url in [
            "bucket",
            "ftp://host/x",
            "s3://",
            "file://",
            "file://host/x",
            "s3://key:secret@bucket/x",
            "s3://b?x=1",
        ] {
            let error = connect(&Bucket::Url(url.into())).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{url}: {error}");
            assert!(!error.text.contains("secret"), "{error}");
        }
    }
}
