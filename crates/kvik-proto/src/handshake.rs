//! Who is there: versions, identities and the mutual proof of the secret.
//!
//! ```text
//! opener                               listener
//!   Hello(versions, id, nonce)  ---->
//!                               <----  Welcome(version, id, nonce, proof)
//!   Prove(proof, facts)         ---->
//!                               <----  Ready(facts)            or Refuse(why) at any point
//! ```
//!
//! A proof is a keyed blake3 hash over both greetings under a key derived from the shared secret, with a different
//! word for each side, so it can be neither replayed nor reflected. Without a secret the same exchange runs under an
//! empty key: it then proves nothing, and listeners allow it on loopback only. The session's number and key
//! come from the same transcript; a data channel joins a session by a proof under that key.
//!
//! Where a connection runs under TLS, both sides mix what only its two ends can derive (a [`Binding`]) into the
//! transcript and into the proof of a join: whoever passes greetings from one TLS connection to another, with a
//! certificate that both sides admit, proves nothing on either without the secret.

use crate::OWN_SESSION;
use crate::nics::Nics;
use crate::wire::{MAX_TEXT, Reader, Writer};
use kvik_core::{Code, EngineId, Error, Incarnation, Result};

/// The protocol versions that this crate speaks, oldest and newest.
pub const VERSIONS: (u16, u16) = (3, 5);
const MAGIC: [u8; 4] = *b"kvik";
const HEADER: usize = 8;
const MAX_BODY: usize = 2048;

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const PROVE: u8 = 3;
const READY: u8 = 4;
const REFUSE: u8 = 5;
const JOIN: u8 = 6;
/// All of them: another one is none.
const KINDS: [u8; 6] = [HELLO, WELCOME, PROVE, READY, REFUSE, JOIN];

/// Random bytes of one side of a handshake.
pub type Nonce = [u8; 32];

/// What only the two ends of one TLS connection know: exported keying material.
pub type Binding = [u8; 32];

/// Who an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// Its id.
    pub engine: EngineId,
    /// Its start.
    pub incarnation: Incarnation,
}

/// What an engine tells an admitted peer about its host, to find out whether they share it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Hash of the kernel's boot id.
    pub boot: [u8; 16],
    /// Inode of the process-id namespace.
    pub pid_namespace: u64,
    /// Inode of the user namespace.
    pub user_namespace: u64,
    /// Inode of the network namespace.
    pub network_namespace: u64,
    /// Effective user.
    pub uid: u32,
    /// Process id in that namespace.
    pub pid: u32,
    /// Abstract name of the UNIX socket for the local transport; empty without one.
    pub local_name: String,
    /// What the engine is called in logs.
    pub name: String,
    /// Its NICs for one-sided transfers.
    pub nics: Nics,
}

/// The shared secret's key, or none.
#[derive(Clone)]
pub struct Secret(Option<[u8; 32]>);

impl Secret {
    /// The key of a secret; `None` for an engine without one.
    pub fn new(secret: Option<&[u8]>) -> Secret {
        Secret(secret.map(|secret| blake3::derive_key("kvik v1 shared secret", secret)))
    }

    fn is_set(&self) -> bool {
        self.0.is_some()
    }

    fn prove(&self, word: &[u8], transcript: &[u8; 32]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0.unwrap_or_default());
        hasher.update(word).update(transcript);
        hasher.finalize()
    }
}

/// A control connection whose two sides know each other.
#[derive(Debug, Clone)]
pub struct Established {
    /// The session's number.
    pub session: u64,
    /// Proves that a channel belongs to the session.
    pub key: SessionKey,
    /// The agreed version.
    pub version: u16,
    /// The peer.
    pub peer: Identity,
    /// The peer's host.
    pub facts: Facts,
    /// Whether this side opened the connection.
    pub opener: bool,
    /// Whether the engine has a one-sided link to the peer. A handshake cannot know: who adds the session says so
    /// first, since other threads begin transfers on it from its first moment.
    pub one_sided: bool,
}

/// The key of a session; never shown.
#[derive(Clone, Copy)]
pub struct SessionKey([u8; 32]);

impl std::fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionKey")
    }
}

/// What a further connection of a session is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JoinKind {
    /// A data channel.
    Data,
    /// The local link: descriptors of shared memory.
    Local,
}

/// A connection that asks to belong to a session.
#[derive(Debug, Clone)]
pub struct Join {
    /// The session.
    pub session: u64,
    /// Which of its channels.
    pub index: u16,
    /// What for.
    pub kind: JoinKind,
    nonce: Nonce,
    /// Of the connection that asks; it does not travel.
    binding: Option<Binding>,
    proof: [u8; 32],
}

impl Join {
    /// A request to join, signed with the session's key.
    pub fn new(session: u64, index: u16, kind: JoinKind, key: &SessionKey, nonce: Nonce) -> Join {
        Join { session, index, kind, nonce, binding: None, proof: [0; 32] }.signed(key)
    }

    /// The same request for a connection under TLS: it is worth nothing on any other.
    pub fn bound(self, key: &SessionKey, binding: Binding) -> Join {
        Join { binding: Some(binding), ..self }.signed(key)
    }

    fn signed(self, key: &SessionKey) -> Join {
        Join { proof: self.prove(key).into(), ..self }
    }

    /// Whether it was signed with this key, for the connection that it came on.
    pub fn is_signed_with(&self, key: &SessionKey) -> bool {
        self.prove(key) == self.proof
    }

    fn prove(&self, key: &SessionKey) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&key.0);
        hasher.update(b"join").update(&self.session.to_le_bytes()).update(&self.index.to_le_bytes());
        hasher.update(&[self.kind as u8]).update(&self.nonce);
        if let Some(binding) = &self.binding {
            hasher.update(b"tls").update(binding);
        }
        hasher.finalize()
    }

    /// Its message.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u64(self.session).u16(self.index).u8(self.kind as u8).bytes(&self.nonce).bytes(&self.proof);
        message(JOIN, &w.0)
    }
}

/// The answer to a [`Join`] or the end of a handshake that is refused.
pub fn refusal(error: &Error) -> Vec<u8> {
    let mut w = Writer::default();
    w.u16(error.code as u16).text(&error.text, MAX_TEXT);
    message(REFUSE, &w.0)
}

/// The answer to a [`Join`] that is welcome.
pub fn joined() -> Vec<u8> {
    message(READY, &[])
}

/// Reads the answer to a [`Join`]: `None` until all of it is there.
///
/// # Errors
/// What the peer says, or `PeerNotKvik`.
pub fn read_joined(input: &mut Vec<u8>) -> Result<Option<()>> {
    let Some((kind, body)) = next_message(input)? else { return Ok(None) };
    match kind {
        READY if body.is_empty() => Ok(Some(())),
        REFUSE => Err(read_refusal(&body)),
        _ => Err(unexpected(kind)),
    }
}

/// This engine as its handshakes know it.
#[derive(Clone)]
pub struct Local {
    /// Who it is.
    pub identity: Identity,
    /// The secret.
    pub secret: Secret,
    /// What it tells an admitted peer.
    pub facts: Facts,
}

/// What the first message of an accepted connection turned out to be.
pub enum Greeting {
    /// A control connection, whole.
    Control(Established),
    /// A further connection of a session; the session's owner answers it.
    Join(Join),
}

enum State {
    /// Opener: waits for the welcome.
    Welcome {
        hello: Vec<u8>,
        want: Option<Identity>,
    },
    /// Opener: waits for the facts.
    Ready(Agreed),
    /// Listener: waits for the first message.
    First,
    /// Listener: waits for the proof.
    Prove(Agreed),
    Over,
}

/// What both greetings together say.
struct Agreed {
    transcript: [u8; 32],
    version: u16,
    peer: Identity,
}

/// One side of a handshake in the making.
pub struct Handshake {
    local: Local,
    nonce: Nonce,
    binding: Option<Binding>,
    state: State,
}

impl Handshake {
    /// The opener's side and its first message. `want` is whom the opener means to reach, if it knows.
    pub fn open(local: Local, nonce: Nonce, want: Option<Identity>) -> (Handshake, Vec<u8>) {
        let mut w = Writer::default();
        w.u16(VERSIONS.0).u16(VERSIONS.1).u8(local.secret.is_set().into());
        write_identity(&local.identity, &mut w);
        w.bytes(&nonce).option(want.as_ref(), write_identity);
        let hello = message(HELLO, &w.0);
        let state = State::Welcome { hello: hello.clone(), want };
        (Handshake { local, nonce, binding: None, state }, hello)
    }

    /// The listener's side.
    pub fn listen(local: Local, nonce: Nonce) -> Handshake {
        Handshake { local, nonce, binding: None, state: State::First }
    }

    /// Who has answered the opener, with the proof of the secret; the opener itself may not be known to it yet.
    pub fn answered(&self) -> Option<Identity> {
        match &self.state {
            State::Ready(agreed) => Some(agreed.peer),
            _ => None,
        }
    }

    /// Ties the handshake to the TLS connection that it runs on; before anything is received.
    pub fn bind(&mut self, binding: Binding) {
        self.binding = Some(binding);
    }

    /// Takes what has arrived off the front of `input` and appends to `output` what must be sent, a refusal too.
    /// Gives the result once the handshake is over; what is left in `input` then belongs to what follows.
    ///
    /// # Errors
    /// Why there will be no session. Send `output` before closing: it tells the peer.
    pub fn receive(&mut self, input: &mut Vec<u8>, output: &mut Vec<u8>) -> Result<Option<Greeting>> {
        while let Some((kind, body)) = next_message(input)? {
            if kind == REFUSE {
                self.state = State::Over;
                return Err(read_refusal(&body));
            }
            match self.step(kind, &body, output) {
                Ok(None) => {}
                Ok(Some(greeting)) => return Ok(Some(greeting)),
                Err(error) => {
                    self.state = State::Over;
                    output.extend_from_slice(&refusal(&error));
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    fn step(&mut self, kind: u8, body: &[u8], output: &mut Vec<u8>) -> Result<Option<Greeting>> {
        match (std::mem::replace(&mut self.state, State::Over), kind) {
            (State::Welcome { hello, want }, WELCOME) => {
                self.on_welcome(&hello, want, body, output).map(|()| None)
            }
            (State::Ready(agreed), READY) => {
                let facts = read_facts(&mut Reader::new(body, "ready"))?;
                Ok(Some(Greeting::Control(self.established(agreed, facts, true))))
            }
            (State::First, HELLO) => self.on_hello(body, output).map(|()| None),
            (State::First, JOIN) => read_join(body, self.binding).map(|join| Some(Greeting::Join(join))),
            (State::Prove(agreed), PROVE) => {
                let mut r = Reader::new(body, "prove");
                let proof: [u8; 32] = r.array()?;
                self.check_proof(b"opener", &agreed.transcript, &proof)?;
                let facts = read_facts(&mut r)?;
                let mut w = Writer::default();
                write_facts(&self.local.facts, &mut w);
                output.extend_from_slice(&message(READY, &w.0));
                Ok(Some(Greeting::Control(self.established(agreed, facts, false))))
            }
            (_, kind) => Err(unexpected(kind)),
        }
    }

    fn on_hello(&mut self, body: &[u8], output: &mut Vec<u8>) -> Result<()> {
        let mut r = Reader::new(body, "hello");
        let (oldest, newest) = (r.u16()?, r.u16()?);
        let version = agree((oldest, newest))?;
        let secret = r.bool()?;
        let peer = read_identity(&mut r)?;
        let _nonce: Nonce = r.array()?;
        if let Some(want) = r.option(read_identity)? {
            check_wanted(&want, &self.local.identity)?;
        }
        r.end()?;
        check_same_demand(self.local.secret.is_set(), secret)?;
        if peer.engine == self.local.identity.engine {
            return Err(Error::new(
                Code::InvalidArgument,
                "an engine connected to itself: its own tickets need no connection, and it is its own peer nowhere",
            ));
        }
        let mut w = Writer::default();
        w.u16(version).u8(self.local.secret.is_set().into());
        write_identity(&self.local.identity, &mut w);
        w.bytes(&self.nonce);
        let transcript = transcript(body, &w.0, self.binding.as_ref());
        w.bytes(self.local.secret.prove(b"listener", &transcript).as_bytes());
        output.extend_from_slice(&message(WELCOME, &w.0));
        self.state = State::Prove(Agreed { transcript, version, peer });
        Ok(())
    }

    fn on_welcome(
        &mut self,
        hello: &[u8],
        want: Option<Identity>,
        body: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<()> {
        let mut r = Reader::new(body, "welcome");
        let version = r.u16()?;
        if !(VERSIONS.0..=VERSIONS.1).contains(&version) {
            return Err(r.wrong("it agrees on a version that was not offered"));
        }
        let secret = r.bool()?;
        let peer = read_identity(&mut r)?;
        let _nonce: Nonce = r.array()?;
        let proof: [u8; 32] = r.array()?;
        r.end()?;
        check_same_demand(self.local.secret.is_set(), secret)?;
        if let Some(want) = want {
            check_wanted(&want, &peer)?;
        }
        let signed = body.len() - proof.len();
        let transcript = transcript(&hello[HEADER..], &body[..signed], self.binding.as_ref());
        self.check_proof(b"listener", &transcript, &proof)?;
        let mut w = Writer::default();
        w.bytes(self.local.secret.prove(b"opener", &transcript).as_bytes());
        write_facts(&self.local.facts, &mut w);
        output.extend_from_slice(&message(PROVE, &w.0));
        self.state = State::Ready(Agreed { transcript, version, peer });
        Ok(())
    }

    /// Compares in constant time.
    fn check_proof(&self, word: &[u8], transcript: &[u8; 32], proof: &[u8; 32]) -> Result<()> {
        if self.local.secret.prove(word, transcript) == *proof {
            return Ok(());
        }
        let between = match self.binding {
            Some(_) => "; or somebody stands between them, with a certificate that both sides admit",
            None => "",
        };
        Err(Error::new(
            Code::SecretMismatch,
            format!(
                "the two engines have different secrets: give both the same `secret` (KVIK_SECRET){between}"
            ),
        ))
    }

    fn established(&self, agreed: Agreed, facts: Facts, opener: bool) -> Established {
        let Agreed { transcript, version, peer } = agreed;
        let key: [u8; 32] = self.local.secret.prove(b"session key", &transcript).into();
        let number = self.local.secret.prove(b"session number", &transcript);
        let mut session = [0; 8];
        session.copy_from_slice(&number.as_bytes()[..8]);
        Established {
            session: u64::from_le_bytes(session).max(OWN_SESSION + 1),
            key: SessionKey(key),
            version,
            peer,
            facts,
            opener,
            one_sided: false,
        }
    }
}

fn transcript(hello: &[u8], welcome: &[u8], binding: Option<&Binding>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("kvik v1 transcript");
    for part in [hello, welcome].into_iter().chain(binding.map(|binding| &binding[..])) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().into()
}

fn agree(theirs: (u16, u16)) -> Result<u16> {
    let newest = VERSIONS.1.min(theirs.1);
    if newest >= VERSIONS.0 && newest >= theirs.0 {
        return Ok(newest);
    }
    Err(Error::new(
        Code::VersionMismatch,
        format!(
            "no protocol version in common: one engine speaks {} to {}, the other {} to {}; update the older one",
            theirs.0, theirs.1, VERSIONS.0, VERSIONS.1
        ),
    ))
}

fn check_same_demand(here: bool, there: bool) -> Result<()> {
    if here == there {
        return Ok(());
    }
    Err(Error::new(
        Code::SecretRequired,
        "one engine has a secret and the other has none: give both the same `secret` (KVIK_SECRET)",
    ))
}

fn check_wanted(want: &Identity, found: &Identity) -> Result<()> {
    if want.engine != found.engine {
        return Err(Error::new(
            Code::TicketForeign,
            format!(
                "the ticket is of engine {}, but engine {} listens at its address now: the ticket is of an earlier \
                 boot or container, or the address leads elsewhere; ask for a new one",
                want.engine, found.engine
            ),
        ));
    }
    if want.incarnation != found.incarnation {
        return Err(Error::new(
            Code::PeerRestarted,
            format!(
                "engine {} was started anew (incarnation {:x}, the ticket is of {:x}); earlier tickets are void",
                found.engine, found.incarnation.0, want.incarnation.0
            ),
        ));
    }
    Ok(())
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut w = Writer::default();
    w.bytes(&MAGIC).u8(kind).u8(0).u16(body.len() as u16).bytes(body);
    w.0
}

fn next_message(input: &mut Vec<u8>) -> Result<Option<(u8, Vec<u8>)>> {
    let seen = input.len().min(MAGIC.len());
    if input[..seen] != MAGIC[..seen] {
        return Err(Error::new(
            Code::PeerNotKvik,
            "what answers there does not speak kvik's protocol: check the address and port",
        ));
    }
    let Some(header) = input.first_chunk::<HEADER>() else { return Ok(None) };
    let (kind, len) = (header[4], usize::from(u16::from_le_bytes([header[6], header[7]])));
    if !KINDS.contains(&kind) {
        return Err(Error::new(
            Code::ProtocolError,
            format!("the peer sent a greeting of unknown kind {kind}"),
        ));
    }
    if len > MAX_BODY {
        return Err(Error::new(Code::ProtocolError, format!("the peer announced a greeting of {len} bytes")));
    }
    if input.len() < HEADER + len {
        return Ok(None);
    }
    let body = input[HEADER..HEADER + len].to_vec();
    input.drain(..HEADER + len);
    Ok(Some((kind, body)))
}

fn unexpected(kind: u8) -> Error {
    Error::new(Code::ProtocolError, format!("the peer sent greeting {kind} where another was due"))
}

fn read_refusal(body: &[u8]) -> Error {
    let mut r = Reader::new(body, "refuse");
    let refused = r.u16().and_then(|code| Ok(Error::new(Code::from_wire(code), r.text(MAX_TEXT)?)));
    refused.unwrap_or_else(|error| error)
}

fn read_join(body: &[u8], binding: Option<Binding>) -> Result<Join> {
    let mut r = Reader::new(body, "join");
    let (session, index) = (r.u64()?, r.u16()?);
    let kind = r.one_of(&[JoinKind::Data, JoinKind::Local], "its kind is unknown")?;
    let (nonce, proof) = (r.array()?, r.array()?);
    r.end()?;
    Ok(Join { session, index, kind, nonce, binding, proof })
}

fn write_identity(identity: &Identity, w: &mut Writer) {
    w.bytes(&identity.engine.0).u64(identity.incarnation.0);
}

fn read_identity(r: &mut Reader) -> Result<Identity> {
    Ok(Identity { engine: EngineId(r.array()?), incarnation: Incarnation(r.u64()?) })
}

fn write_facts(facts: &Facts, w: &mut Writer) {
    w.bytes(&facts.boot).u64(facts.pid_namespace).u64(facts.user_namespace).u64(facts.network_namespace);
    w.u32(facts.uid).u32(facts.pid).text(&facts.local_name, 100).text(&facts.name, 100);
    facts.nics.encode(w);
}

fn read_facts(r: &mut Reader) -> Result<Facts> {
    let boot = r.array()?;
    let (pid_namespace, user_namespace, network_namespace) = (r.u64()?, r.u64()?, r.u64()?);
    let (uid, pid) = (r.u32()?, r.u32()?);
    let (local_name, name, nics) = (r.text(100)?, r.text(100)?, Nics::decode(r)?);
    r.end()?;
    Ok(Facts { boot, pid_namespace, user_namespace, network_namespace, uid, pid, local_name, name, nics })
}
