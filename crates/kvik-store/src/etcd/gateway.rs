//! etcd's JSON gateway: what is asked, and the answer as it comes.
//!
//! Invariants:
//! - Every wait has an end, and what is held of an answer has a bound: who answers is believed in neither.
//! - It is used by one thread at a time; its requests run while that thread waits for them.

use super::Etcd;
use super::access::{Login, login, with_certificates};
use kvik_core::{Code, Error, Result};
use reqwest::{Client, Response, StatusCode, redirect};
use serde_json::{Value, json};
use std::error::Error as _;
use std::future::Future;
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};

/// How long etcd may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// What etcd says of a token that is older than a change of its users.
const OLD_TOKEN: &str = "revision of auth store is old";
/// The longest answer, and the longest line of one that goes on.
const MOST: usize = 4 << 20;

/// Speaks to an etcd.
pub(crate) struct Gateway {
    etcd: Etcd,
    /// None when it is dropped.
    runtime: Option<Runtime>,
    client: Client,
    login: Option<Login>,
    /// What etcd has given for the login.
    token: Option<String>,
}

/// An answer that goes on.
pub(super) struct Stream {
    response: Response,
    came: Vec<u8>,
}

/// What comes next of an answer that goes on.
pub(super) enum Next {
    Line(Vec<u8>),
    Nothing,
    End,
}

impl Gateway {
    /// Asks nothing yet: etcd may be away, and come. Certificates and user come from the environment.
    ///
    /// # Errors
    /// `InvalidArgument` for what the environment names and cannot be used; the machine gives no resources.
    pub fn open(etcd: &Etcd) -> Result<Gateway> {
        // The provider that kvik has anyway; one that the process has chosen before stays.
        drop(rustls::crypto::ring::default_provider().install_default());
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let login = login(variable)?;
        // A proxy is for what is far away, and may keep an answer that goes on until it has all of it.
        let mut builder = Client::builder().no_proxy().redirect(redirect::Policy::none());
        if etcd.is_encrypted() {
            builder = with_certificates(builder, variable)?;
        }
        let client = builder.build().map_err(|error| {
            let text = format!("{etcd} cannot be spoken to: {}", with_causes(&error));
            Error::new(Code::InvalidArgument, text)
        })?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| {
            Error::new(Code::StoreUnavailable, format!("nothing is left to speak to {etcd} with: {error}"))
        })?;
        Ok(Gateway { etcd: etcd.clone(), runtime: Some(runtime), client, login, token: None })
    }

    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    /// Asks for one answer.
    ///
    /// # Errors
    /// `StoreUnavailable` where etcd does not answer, or refuses; `ProtocolError` for an answer that is none.
    pub fn ask(&mut self, path: &str, request: &Value) -> Result<Value> {
        let stream = self.stream(path, request)?;
        self.value(stream)
    }

    /// Asks for an answer that goes on.
    ///
    /// # Errors
    /// `StoreUnavailable` where etcd does not answer, or refuses.
    pub(super) fn stream(&mut self, path: &str, request: &Value) -> Result<Stream> {
        if let Some(login) = self.login.clone().filter(|_| self.token.is_none()) {
            self.authenticate(&login)?;
        }
        let response = self.post(path, request)?;
        let ended = response.status() == StatusCode::UNAUTHORIZED;
        let refused = match (self.checked(response), self.login.clone()) {
            // A token ends that was not used for some minutes, and with a change of users or of what they may.
            (Err(error), Some(login)) if ended || error.text.contains(OLD_TOKEN) => login,
            (answered, _) => return answered,
        };
        self.authenticate(&refused)?;
        self.checked(self.post(path, request)?)
    }

    /// What comes next, for so long.
    ///
    /// # Errors
    /// As for [`Gateway::stream`].
    pub(super) fn next(&self, stream: &mut Stream, wait: Duration) -> Result<Next> {
        loop {
            if let Some(end) = stream.came.iter().position(|byte| *byte == b'\n') {
                return Ok(Next::Line(stream.came.drain(..=end).collect()));
            }
            let piece = self.run(wait, stream.response.chunk());
            match piece.map(|piece| piece.map_err(|error| with_causes(&error))) {
                None => return Ok(Next::Nothing),
                Some(Ok(None)) => return Ok(Next::End),
                Some(Ok(Some(piece))) => stream.add(&piece),
                Some(Err(text)) => Err(text),
            }
            .map_err(|text| self.unavailable(&text))?;
        }
    }

    /// All of an answer.
    fn whole(&self, mut stream: Stream) -> Result<Vec<u8>> {
        self.within(PATIENCE, async {
            while let Some(piece) = stream.response.chunk().await.map_err(|error| with_causes(&error))? {
                stream.add(&piece)?;
            }
            Ok(stream.came)
        })
    }

    fn value(&self, stream: Stream) -> Result<Value> {
        serde_json::from_slice(&self.whole(stream)?).map_err(|error| {
            let text = format!("{} answers with what is no JSON: {error}", self.etcd);
            Error::new(Code::ProtocolError, text)
        })
    }

    fn authenticate(&mut self, login: &Login) -> Result<()> {
        self.token = None;
        let request = json!({ "name": login.name, "password": login.password });
        let said = self.value(self.checked(self.post("auth/authenticate", &request)?)?)?;
        let token = said["token"].as_str().ok_or_else(|| self.unavailable("it gives no token"))?;
        self.token = Some(token.to_owned());
        Ok(())
    }

    fn post(&self, path: &str, request: &Value) -> Result<Response> {
        let mut builder = self.client.post(format!("{}/v3/{path}", self.etcd.url()));
        if let Some(token) = &self.token {
            builder = builder.header("Authorization", token);
        }
        let sending = builder.header("Content-Type", "application/json").body(request.to_string()).send();
        self.within(PATIENCE, async { sending.await.map_err(|error| with_causes(&error)) })
    }

    /// An answer that is no refusal.
    fn checked(&self, response: Response) -> Result<Stream> {
        let status = response.status();
        let stream = Stream { response, came: Vec::new() };
        if status == StatusCode::OK {
            return Ok(stream);
        }
        let said = self.whole(stream).unwrap_or_default();
        let said: String = String::from_utf8_lossy(&said).chars().take(200).collect();
        Err(self.unavailable(&format!("{status}: {said}")))
    }

    fn within<T: Send>(
        &self,
        wait: Duration,
        work: impl Future<Output = Result<T, String>> + Send,
    ) -> Result<T> {
        let answer = self.run(wait, work).unwrap_or_else(|| Err("no answer came in time".into()));
        answer.map_err(|text| self.unavailable(&text))
    }

    /// Works for so long; none where it takes longer.
    fn run<T: Send>(&self, wait: Duration, work: impl Future<Output = T> + Send) -> Option<T> {
        let runtime = self.runtime.as_ref()?;
        let run = || runtime.block_on(async { tokio::time::timeout(wait, work).await.ok() });
        if Handle::try_current().is_err() {
            return run();
        }
        // A thread of somebody's runtime must not wait within it.
        std::thread::scope(|scope| scope.spawn(run).join().ok().flatten())
    }

    fn unavailable(&self, text: &str) -> Error {
        Error::new(Code::StoreUnavailable, format!("{} does not answer as it should: {text}", self.etcd))
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // A name may still be resolved, which nothing ends.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Stream {
    fn add(&mut self, piece: &[u8]) -> Result<(), String> {
        if self.came.len() + piece.len() > MOST {
            return Err("an answer is longer than anything that was asked for".into());
        }
        self.came.extend_from_slice(piece);
        Ok(())
    }
}

/// What an error of the HTTP client says, with what it comes from: by itself it says "error sending request".
fn with_causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    const SOON: Duration = Duration::from_secs(20);

    /// The gateway of something that answers each connection with these bytes, one at a time.
    fn answering(bytes: &'static [u8]) -> Gateway {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).unwrap() > 0);
            bytes.iter().try_for_each(|byte| stream.write_all(&[*byte]))
        });
        Gateway::open(&Etcd::parse(&format!("http://127.0.0.1:{port}/kvik")).unwrap()).unwrap()
    }

    fn asked(bytes: &'static [u8]) -> Result<Value> {
        answering(bytes).ask("kv/range", &json!({}))
    }

    #[test]
    fn a_token_of_before_a_change_of_users_is_asked_for_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let etcd = Etcd::parse(&format!("http://{}/kvik", listener.local_addr().unwrap())).unwrap();
        let answers = [
            (200, r#"{"token":"first"}"#),
            (400, r#"{"error":"etcdserver: revision of auth store is old","code":3}"#),
            (200, r#"{"token":"second"}"#),
            (200, "{}"),
        ];
        let asked = std::thread::spawn(move || {
            let asked = answers.map(|(status, said)| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1024];
                let count = stream.read(&mut request).unwrap();
                let length = said.len();
                let head =
                    format!("HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
                stream.write_all((head + said).as_bytes()).unwrap();
                String::from_utf8_lossy(&request[..count]).to_lowercase()
            });
            asked.map(|request| request.contains("authorization: second"))
        });
        let mut gateway = Gateway::open(&etcd).unwrap();
        gateway.login = Some(Login { name: "root".into(), password: "secret".into() });
        assert_eq!(gateway.ask("kv/range", &json!({})).unwrap(), json!({}));
        assert_eq!(asked.join().unwrap(), [false, false, false, true]);
    }

    #[test]
    fn an_answer_comes_whole_or_line_by_line() {
        let sized = asked(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n{\n}\nmore").unwrap();
        assert_eq!(sized, json!({}));
        let mut gateway = answering(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n5;x\r\n[1]\n{\r\n0\r\n\r\n",
        );
        let mut stream = gateway.stream("watch", &json!({})).unwrap();
        for line in [&b"{}\n"[..], b"[1]\n"] {
            assert!(matches!(gateway.next(&mut stream, SOON).unwrap(), Next::Line(said) if said == line));
        }
        assert!(matches!(gateway.next(&mut stream, SOON).unwrap(), Next::End));
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let refused = asked(b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nnothing").unwrap_err();
        assert!(refused.text.contains("404 Not Found: nothing"), "{refused}");
        for bytes in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
            b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
        ] {
            assert_eq!(asked(bytes).unwrap_err().code, Code::StoreUnavailable);
        }
        let text = asked(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno!").unwrap_err();
        assert_eq!(text.code, Code::ProtocolError);
    }

    #[test]
    fn it_is_asked_from_within_a_runtime_too() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let answer = runtime.block_on(async { asked(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") });
        assert_eq!(answer.unwrap(), json!({}));
    }
}
