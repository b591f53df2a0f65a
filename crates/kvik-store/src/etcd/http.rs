//! As much of HTTP as etcd's JSON gateway takes: a request, and its answer as it comes.
//!
//! Invariants:
//! - Every wait has an end, and what is held of an answer has a bound: who answers is believed in neither.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The longest head or chunk of an answer, and the longest body that nobody has taken yet.
const MOST: usize = 4 << 20;
const PIECE: usize = 16 << 10;

/// An answer that comes.
pub(super) struct Answer {
    stream: TcpStream,
    /// What has come and was not understood yet.
    raw: Vec<u8>,
    body: Vec<u8>,
    kind: Kind,
    ended: bool,
}

/// How the end of a body is told.
enum Kind {
    Chunked,
    Sized(usize),
    UntilClosed,
}

fn wrong(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, text.into())
}

fn left(until: Instant) -> Result<Duration> {
    match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(Error::new(ErrorKind::TimedOut, "no answer came in time")),
        left => Ok(left),
    }
}

/// Whether an error says that nothing has come so far.
pub(super) fn is_silence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

impl Answer {
    /// Sends a request, and waits for the head of its answer.
    ///
    /// # Errors
    /// Nobody answers in time; the answer is none, or says that the request has failed.
    pub fn to((host, port): (&str, u16), path: &str, json: &str, until: Instant) -> Result<Answer> {
        let mut stream = connect(host, port, until)?;
        stream.set_write_timeout(Some(left(until)?))?;
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{json}",
            json.len()
        );
        stream.write_all(request.as_bytes())?;
        let kind = Kind::UntilClosed;
        let mut answer = Answer { stream, raw: Vec::new(), body: Vec::new(), kind, ended: false };
        let head = loop {
            if let Some(end) = answer.raw.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                let head: Vec<u8> = answer.raw.drain(..end + 4).collect();
                break String::from_utf8(head).map_err(|_| wrong("the head of an answer is no text"))?;
            }
            if !answer.receive(left(until)?)? {
                return Err(Error::new(ErrorKind::UnexpectedEof, "the connection ended before an answer"));
            }
        };
        answer.kind = body_of(&head)?;
        answer.decode()?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        if status != "200" {
            let said = answer.whole(until).unwrap_or_default();
            let said: String = String::from_utf8_lossy(&said).chars().take(200).collect();
            return Err(wrong(format!("status {status}: {said}")));
        }
        Ok(answer)
    }

    /// The next line of the body, where it comes by then; none at the end of the body.
    ///
    /// # Errors
    /// It has not come by then ([`is_silence`]), or what comes is no body.
    pub fn line(&mut self, until: Instant) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.body.iter().position(|byte| *byte == b'\n') {
                return Ok(Some(self.body.drain(..=end).collect()));
            }
            if self.ended {
                let rest = std::mem::take(&mut self.body);
                return Ok(Some(rest).filter(|rest| !rest.is_empty()));
            }
            self.more(left(until)?)?;
        }
    }

    /// All of the body.
    ///
    /// # Errors
    /// As for [`Answer::line`].
    pub fn whole(&mut self, until: Instant) -> Result<Vec<u8>> {
        while !self.ended {
            self.more(left(until)?)?;
        }
        Ok(std::mem::take(&mut self.body))
    }

    fn more(&mut self, wait: Duration) -> Result<()> {
        if !self.receive(wait)? {
            match self.kind {
                Kind::UntilClosed => self.ended = true,
                _ => return Err(Error::new(ErrorKind::UnexpectedEof, "the connection ended amid an answer")),
            }
        }
        self.decode()
    }

    /// Takes what comes; false at the end of the connection.
    fn receive(&mut self, wait: Duration) -> Result<bool> {
        self.stream.set_read_timeout(Some(wait.max(Duration::from_millis(1))))?;
        let mut piece = [0; PIECE];
        let count = self.stream.read(&mut piece)?;
        self.raw.extend_from_slice(&piece[..count]);
        if self.raw.len() + self.body.len() > MOST {
            return Err(wrong("an answer is longer than anything that was asked for"));
        }
        Ok(count > 0)
    }

    /// Moves what is of the body from what has come.
    fn decode(&mut self) -> Result<()> {
        match &mut self.kind {
            Kind::UntilClosed => self.body.append(&mut self.raw),
            Kind::Sized(missing) => {
                let count = self.raw.len().min(*missing);
                *missing -= count;
                self.ended = *missing == 0;
                self.body.extend(self.raw.drain(..count));
            }
            Kind::Chunked => {
                while let Some((start, size)) = chunk(&self.raw)? {
                    if self.raw.len() < start + size + 2 {
                        break;
                    }
                    self.body.extend_from_slice(&self.raw[start..start + size]);
                    self.raw.drain(..start + size + 2);
                    if size == 0 {
                        self.ended = true;
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Where the next chunk's bytes begin, and how many they are; none where its line has not all come.
fn chunk(raw: &[u8]) -> Result<Option<(usize, usize)>> {
    let Some(end) = raw.windows(2).position(|bytes| bytes == b"\r\n") else { return Ok(None) };
    let line = std::str::from_utf8(&raw[..end]).unwrap_or_default();
    let digits = line.split(';').next().unwrap_or_default().trim();
    match usize::from_str_radix(digits, 16) {
        Ok(size) if size <= MOST => Ok(Some((end + 2, size))),
        _ => Err(wrong("a chunk of an answer has no size that can be")),
    }
}

fn body_of(head: &str) -> Result<Kind> {
    let mut kind = Kind::UntilClosed;
    for line in head.lines().skip(1) {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.trim();
        if name.eq_ignore_ascii_case("transfer-encoding") && value.eq_ignore_ascii_case("chunked") {
            return Ok(Kind::Chunked);
        }
        if name.eq_ignore_ascii_case("content-length") {
            kind = match value.parse() {
                Ok(size) if size <= MOST => Kind::Sized(size),
                _ => return Err(wrong(format!("a body of {value:?} bytes"))),
            };
        }
    }
    Ok(kind)
}

fn connect(host: &str, port: u16, until: Instant) -> Result<TcpStream> {
    let mut failure = Error::new(ErrorKind::NotFound, format!("{host} has no address"));
    for address in (host.trim_matches(['[', ']']), port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(until)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const SOON: Duration = Duration::from_secs(20);

    /// The answer to a request that is answered with these bytes, one at a time.
    fn answered(bytes: &'static [u8]) -> Result<Answer> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let answering = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).unwrap() > 0);
            bytes.iter().try_for_each(|byte| stream.write_all(&[*byte]))
        });
        let answer = Answer::to(("127.0.0.1", port), "/v3/kv/range", "{}", Instant::now() + SOON);
        drop(answering.join().unwrap());
        answer
    }

    #[test]
    fn bodies_come_in_three_ways() {
        let until = Instant::now() + SOON;
        let mut chunked = answered(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n5;x\r\n[1]\n{\r\n0\r\n\r\n",
        )
        .unwrap();
        assert_eq!(chunked.line(until).unwrap().as_deref(), Some(&b"{}\n"[..]));
        assert_eq!(chunked.line(until).unwrap().as_deref(), Some(&b"[1]\n"[..]));
        assert_eq!(chunked.line(until).unwrap().as_deref(), Some(&b"{"[..]));
        assert_eq!(chunked.line(until).unwrap(), None);
        let mut sized = answered(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n{\n}\nmore").unwrap();
        assert_eq!(sized.whole(until).unwrap(), b"{\n}\n");
        let mut closed = answered(b"HTTP/1.0 200 OK\r\n\r\n{}").unwrap();
        assert_eq!(closed.whole(until).unwrap(), b"{}");
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let until = Instant::now() + SOON;
        let refused = answered(b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nnothing").err().unwrap();
        assert!(refused.to_string().contains("404: nothing"), "{refused}");
        assert!(answered(b"").is_err());
        assert!(answered(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n").is_err());
        let mut short = answered(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}").unwrap();
        assert!(short.whole(until).is_err());
        let chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n";
        assert!(answered(chunk).and_then(|mut answer| answer.whole(until)).is_err());
    }
}
