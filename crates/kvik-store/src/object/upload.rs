//! Writing and removing objects: one task sends batches in their order, and removes what nobody wants any more.

use super::batch::{self, Batch, Contents, Finished};
use super::open::read_end;
use super::state::{Object, QUEUED, Shared, Stage, State, count, number_in};
use crate::log::format::{Seed, What};
use crate::tier::{Place, TierOwner};
use futures_util::StreamExt;
use kvik_core::{Code, Error, Result};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutOptions};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one request that writes or removes may take.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
/// Where objects cannot be removed, that is tried again after so many times what gathering takes.
const REMOVE_AGAIN: u32 = 6;
/// How long a tier that ends goes on sending what it has.
pub(super) const LAST: Duration = Duration::from_secs(15);

/// What is to be done next.
enum Next {
    Send(Finished),
    Remove(Vec<u32>),
    /// More than the tier may hold is there: this object goes.
    MakeRoom(u32),
    /// Nothing, until there is, or this time has passed.
    Wait(Option<Duration>),
    End,
}

impl Shared {
    /// Opens the tier, and then sends and removes until it is closed and nothing is left to send.
    pub async fn keep(self: Arc<Self>) {
        if !self.open().await {
            return;
        }
        loop {
            match self.next() {
                Next::Send(batch) => self.send(batch).await,
                Next::Remove(numbers) => self.remove_objects(numbers).await,
                Next::MakeRoom(number) => self.make_room(number).await,
                Next::Wait(time) => self.rest(time).await,
                Next::End => return,
            }
        }
    }

    /// Waits until there is something to do, or for this time.
    pub async fn rest(&self, time: Option<Duration>) {
        let woken = self.work.notified();
        match time {
            Some(time) => drop(tokio::time::timeout(time, woken).await),
            None => woken.await,
        }
    }

    fn next(&self) -> Next {
        let freed = self.owner.freed();
        let mut state = self.state();
        state.free(&freed);
        let due = state.batch.as_ref().map(|batch| self.options.flush.saturating_sub(batch.since.elapsed()));
        if state.whole.is_empty() && (state.send_now || state.closed || due.is_some_and(|due| due.is_zero()))
        {
            self.seal(&mut state);
        }
        if state.taken_over || (state.closed && state.whole.is_empty()) {
            return if state.closed { Next::End } else { Next::Wait(None) };
        }
        if let Some(left) = self.breaker.closed_for() {
            return if state.closed { Next::End } else { Next::Wait(Some(left)) };
        }
        // Where nothing can be removed, no more is sent than there may be.
        let full = state.bytes > self.options.size;
        let stuck = full && state.remove_again.is_some();
        let left = |again: Option<Instant>| {
            let left = again?.saturating_duration_since(Instant::now());
            (!left.is_zero()).then_some(left)
        };
        let (no_send, no_remove) = (left(state.send_again), left(state.remove_again));
        if let Some(first) = state.whole.front().filter(|_| !stuck && no_send.is_none()) {
            return Next::Send(first.clone());
        }
        if state.closed {
            return Next::End;
        }
        if no_remove.is_none() {
            let idle = state.idle();
            if !idle.is_empty() {
                return Next::Remove(idle);
            }
            if let Some((number, _)) = state.objects.first_key_value().filter(|_| full) {
                return Next::MakeRoom(*number);
            }
        }
        let of_batches = if state.whole.is_empty() { due } else { no_send };
        Next::Wait(of_batches.into_iter().chain(no_remove).min())
    }

    /// Nothing more goes into the batch that is being filled.
    pub fn seal(&self, state: &mut State) {
        state.send_now = false;
        let State { batch, whole, objects, said, .. } = state;
        let Some(mut batch) = batch.take() else { return };
        let is_dead = |number| objects.get(&number).is_some_and(|object| object.live == 0);
        let (removals, from) = said.take_over(batch.number, is_dead);
        for what in removals {
            batch.remove(what);
        }
        batch.instead_of = from;
        whole.push_back(batch.finish(|id| self.meaning(id)));
    }

    /// Sees to it that there is a batch that takes the next record, of so many bytes.
    ///
    /// # Errors
    /// `DeadlineExceeded` where too much waits to be sent; `StorageFailed` where nothing can be written.
    pub fn prepare(&self, state: &mut State, more: u64) -> Result<()> {
        self.check_writable(state)?;
        let full = |batch: &Batch| batch.bytes.len() as u64 + more > self.options.batch;
        if state.batch.as_ref().is_some_and(full) {
            self.seal(state);
        }
        if state.batch.is_none() {
            if state.stage == Stage::Listing || state.whole.len() >= QUEUED {
                let text = format!("the object store at {} takes no more at present", self.name);
                return Err(Error::new(Code::DeadlineExceeded, text));
            }
            let number = state.next_number;
            state.next_number = number.checked_add(1).ok_or_else(|| {
                let text =
                    format!("{} has used up the numbers of its objects: take another prefix", self.name);
                Error::new(Code::StorageFull, text)
            })?;
            let mut seed = Seed::default();
            getrandom::fill(&mut seed).map_err(|error| Error::new(Code::StorageFailed, error.to_string()))?;
            state.batch = Some(Batch::new(number, seed, self.options.batch));
            self.work.notify_one();
        }
        Ok(())
    }

    async fn send(&self, batch: Finished) {
        if !self.breaker.admit() {
            return;
        }
        let still = self.is_still_ours().await;
        let sent = match still {
            Ok(true) => {
                self.breaker.answered();
                self.put(&batch).await
            }
            Ok(false) => {
                self.lose_prefix();
                return;
            }
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            // It stays where it is, and is tried again.
            log::debug!("{error}");
            return;
        }
        self.breaker.answered();
        let Finished { number, seed, blocks, removals, instead_of, bytes } = batch;
        let size = bytes.len() as u64;
        let mut state = self.state();
        state.whole.retain(|whole| whole.number != number);
        let live = blocks.saturating_sub(state.freed.remove(&number).unwrap_or_default());
        state.objects.insert(number, Object { seed, size, live, removals });
        for before in instead_of {
            if let Some(object) = state.objects.get_mut(&before) {
                object.removals = 0;
            }
        }
        state.bytes += size;
        drop(state);
        self.progress.notify_all();
    }

    /// Whether no other server has taken the prefix.
    async fn is_still_ours(&self) -> Result<bool> {
        count(&self.counters.gets, 1);
        let path = self.owner_path();
        let read = async { self.store.get(&path).await?.bytes().await };
        match tokio::time::timeout(LIMIT, read).await {
            Ok(Ok(bytes)) => Ok(bytes[..] == self.id[..]),
            // Whoever cleared the bucket has not taken it.
            Ok(Err(object_store::Error::NotFound { .. })) => self.claim().await.map(|()| true),
            Ok(Err(error)) => Err(self.failed("reading who has the prefix", &error)),
            Err(late) => Err(self.failed("reading who has the prefix", &late)),
        }
    }

    /// Takes the prefix.
    ///
    /// # Errors
    /// `StorageFailed`.
    pub async fn claim(&self) -> Result<()> {
        count(&self.counters.puts, 1);
        let (path, id) = (self.owner_path(), bytes::Bytes::copy_from_slice(&self.id));
        match tokio::time::timeout(LIMIT, self.store.put(&path, id.into())).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(self.failed("taking the prefix", &error)),
            Err(late) => Err(self.failed("taking the prefix", &late)),
        }
    }

    async fn put(&self, batch: &Finished) -> Result<()> {
        let path = self.path(batch.number);
        let mut mode = PutMode::Create;
        loop {
            count(&self.counters.puts, 1);
            let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
            let sending = self.store.put_opts(&path, batch.bytes.clone().into(), options);
            match tokio::time::timeout(LIMIT, sending).await {
                Ok(Ok(_)) => {
                    count(&self.counters.sent, batch.bytes.len() as u64);
                    return Ok(());
                }
                // An earlier attempt whose answer was lost, or another server. One that was killed, or has lost the prefix,
                // may have sent what comes only now: nobody who is to be served here knows a place in it.
                Ok(Err(object_store::Error::AlreadyExists { .. })) if matches!(mode, PutMode::Create) => {
                    if self.is_stored(batch).await? {
                        return Ok(());
                    }
                    if !self.is_still_ours().await? {
                        self.lose_prefix();
                        let text = "another server has written under this name";
                        return Err(Error::new(Code::StorageFailed, text));
                    }
                    mode = PutMode::Overwrite;
                }
                Ok(Err(
                    object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. },
                )) if !matches!(mode, PutMode::Overwrite) => mode = PutMode::Overwrite,
                // The store has just given another one: it is well, and may be read.
                Ok(Err(error)) => {
                    count(&self.counters.failures, 1);
                    let text = format!("writing an object at {}: {error}", self.name);
                    log::warn!("{text}; it is tried again, and what is there is read on");
                    self.state().send_again = Some(Instant::now() + self.options.flush);
                    return Err(Error::new(Code::StorageFailed, text));
                }
                Err(late) => return Err(self.failed("writing an object", &late)),
            }
        }
    }

    /// Whether what is stored under a batch's name is that batch.
    async fn is_stored(&self, batch: &Finished) -> Result<bool> {
        let (path, size) = (self.path(batch.number), batch.bytes.len() as u64);
        count(&self.counters.gets, 1);
        let there = match tokio::time::timeout(LIMIT, self.store.head(&path)).await {
            Ok(Ok(meta)) => meta.size,
            Ok(Err(object_store::Error::NotFound { .. })) => return Ok(false),
            Ok(Err(error)) => return Err(self.failed("looking at an object", &error)),
            Err(late) => return Err(self.failed("looking at an object", &late)),
        };
        // Of one that is shorter there is no such end.
        let own = |end| matches!(end, batch::Read::Contents(Contents { seed, .. }) if seed == batch.seed);
        Ok(there == size && own(read_end(self, batch.number, size).await?))
    }

    /// Another server has the prefix: what was not stored here will not be.
    fn lose_prefix(&self) {
        log::error!(
            "another server has taken over {}: this one writes nothing there any more. Give each server a prefix of its \
             own, and start this one again",
            self.name
        );
        self.state().taken_over = true;
        self.give_up();
    }

    /// What was not sent will not be: its owner knows it no longer.
    pub fn give_up(&self) {
        let mut state = self.state();
        self.seal(&mut state);
        let whole = std::mem::take(&mut state.whole);
        state.given_up.extend(whole.iter().map(|batch| batch.number));
        drop(state);
        self.progress.notify_all();
        for Finished { number, bytes, .. } in whole {
            if let batch::Read::Contents(contents) = batch::read(number, bytes.len() as u64, &bytes) {
                tell_dropped(&*self.owner, &contents);
            }
        }
    }

    async fn remove_objects(&self, numbers: Vec<u32>) {
        if !self.breaker.admit() {
            return;
        }
        let paths: Vec<_> = numbers.iter().map(|number| Ok(self.path(*number))).collect();
        count(&self.counters.deletes, numbers.len() as u64);
        let removing = self.store.delete_stream(futures_util::stream::iter(paths).boxed());
        let (mut gone, mut failed) = (Vec::new(), None);
        match tokio::time::timeout(LIMIT, removing.collect::<Vec<_>>()).await {
            Ok(outcomes) => {
                for outcome in outcomes {
                    match outcome {
                        Ok(path) => gone.push(path),
                        Err(object_store::Error::NotFound { path, .. }) => gone.push(Path::from(path)),
                        Err(error) => failed = Some(error.to_string()),
                    }
                }
            }
            Err(late) => failed = Some(late.to_string()),
        }
        if !gone.is_empty() {
            self.breaker.answered();
        }
        // Who may not remove may well read: that is nothing of which the breaker is told.
        if let Some(error) = &failed {
            count(&self.counters.failures, 1);
            log::warn!(
                "removing objects at {}: {error}; it is tried again. See that this server has the right to; once there \
                 are as many bytes as there may be, nothing more is written",
                self.name
            );
        }
        let mut state = self.state();
        state.remove_again = failed.map(|_| Instant::now() + self.options.flush * REMOVE_AGAIN);
        for number in gone.iter().filter_map(number_in) {
            state.said.gone(number);
            let removed = state.objects.remove(&number).map_or(0, |object| object.size);
            state.bytes = state.bytes.saturating_sub(removed);
        }
    }

    /// The oldest object goes, with the blocks that are in it.
    async fn make_room(&self, number: u32) {
        let Some(size) = self.state().objects.get(&number).map(|object| object.size) else { return };
        if !self.breaker.admit() {
            return;
        }
        match read_end(self, number, size).await {
            Ok(end) => {
                self.breaker.answered();
                // What is in a damaged one is found missing when it is asked for.
                if let batch::Read::Contents(contents) = end {
                    count(&self.counters.dropped, tell_dropped(&*self.owner, &contents));
                }
            }
            Err(error) => {
                log::debug!("{error}");
                return;
            }
        }
        let freed = self.owner.freed();
        let mut state = self.state();
        state.free(&freed);
        if let Some(object) = state.objects.get_mut(&number) {
            object.live = 0;
        }
    }

    /// Waits until all that is named is stored.
    ///
    /// # Errors
    /// `DeadlineExceeded`; `StorageFailed` where some of it will not be.
    pub fn stored(&self, places: &[Place], by: Instant) -> Result<()> {
        let mut state = self.state();
        for place in places {
            let number = crate::log::place::position(*place).0;
            while state.is_unsent(number) {
                if state.batch.as_ref().is_some_and(|batch| batch.number == number) {
                    state.send_now = true;
                }
                self.work.notify_one();
                state = self.wait(state, by, "what was given to it is not stored yet")?;
            }
            if state.given_up.contains(&number) {
                let text = format!("the object store at {} was given up before all was stored", self.name);
                return Err(Error::new(Code::StorageFailed, text));
            }
        }
        Ok(())
    }
}

/// Tells the owner that all blocks of an object are gone; how many there were.
fn tell_dropped(owner: &dyn TierOwner, contents: &Contents) -> u64 {
    let mut blocks = 0;
    for (place, what) in &contents.records {
        if let What::Block(identity) = what {
            owner.dropped(identity, *place);
            blocks += 1;
        }
    }
    blocks
}
