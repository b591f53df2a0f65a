//! Whose turn it is: the sessions of a NIC share it.
//!
//! Two things are scarce: places for work requests, and operations in flight where all connections have one queue. A
//! session takes more of either only while it holds less than is free. So one alone gets half, `n` of them get an
//! `n + 1`th each, and as much stays free for the next one: it never waits for operations of others to end, which they
//! may never do. Where a session comes to what others held before, it gets what ends until it has its share.
//!
//! Handovers have the places before bulk. What a NIC has goes in its own order, so that a handover waits for all of bulk
//! that the NIC has: bulk has few places, and only one before its turn while the NIC has handovers. That one it has in any
//! case, since handovers may be stuck.
//!
//! Sessions that wait for a place take work requests in turn: several at once where that leaves the shares as they are,
//! and not more than [`CLAIM`] bytes. Those with something to post take [`TURN`] bytes: what
//! one has posted beyond that it has less in the next one, so that long operations get no more than short ones.

use super::device::LONGEST;
use kvik_core::{Class, ClassQueue};
use kvik_proto::Batch;
use std::collections::{HashMap, VecDeque};

/// Bytes of a session's turn: no operation is longer, so everybody posts something in each.
const TURN: i64 = LONGEST as i64;
/// Bytes of work requests that a session claims at once, with several places for them: others go on meanwhile.
const CLAIM: u64 = 2 << 20;
/// Places of bulk, shared as all are: with chunks of 512 KiB half of them keep a NIC busy.
const BULK_PLACES: usize = 8;

/// See the module's text.
pub(super) struct Turns {
    sessions: HashMap<u64, Session>,
    /// Sessions that may have a work request that was not claimed.
    waiting: ClassQueue<u64>,
    /// Places of each class that are taken.
    taken: [usize; 2],
    /// Sessions that have something to post. The first one has its turn.
    posting: VecDeque<u64>,
    /// How many of them in a row found no room.
    refused: usize,
    free_places: usize,
    free_operations: usize,
}

#[derive(Default)]
struct Session {
    waits: [bool; 2],
    places: usize,
    /// Those of its places that bulk has.
    bulk: usize,
    /// Those of its places that have something to post.
    ready: VecDeque<usize>,
    operations: usize,
    /// Bytes that it may post in its turn.
    left: i64,
}

impl Turns {
    /// For so many places and operations.
    pub fn new(places: usize, operations: usize) -> Turns {
        Turns {
            sessions: HashMap::new(),
            waiting: ClassQueue::default(),
            taken: [0; 2],
            posting: VecDeque::new(),
            refused: 0,
            free_places: places,
            free_operations: operations,
        }
    }

    /// The session may have a work request to claim.
    pub fn wait(&mut self, session: u64) {
        let of = self.sessions.entry(session).or_default();
        for class in Class::ALL {
            if !std::mem::replace(&mut of.waits[class as usize], true) {
                self.waiting.push(class, session);
            }
        }
    }

    /// The session has none of this class to claim.
    pub fn wait_no_more(&mut self, session: u64, class: Class) {
        if self.sessions.get_mut(&session).is_some_and(|of| std::mem::take(&mut of.waits[class as usize])) {
            self.waiting.remove(class, &session);
            self.drop_idle(session);
        }
    }

    /// The session is over.
    pub fn forget(&mut self, session: u64) {
        Class::ALL.into_iter().for_each(|class| self.wait_no_more(session, class));
    }

    /// Whose turn it is to claim work requests, of which class, and how many, if there is a place for one. It waits on,
    /// behind the others.
    pub fn next_to_claim(&mut self) -> Option<(Class, u64, Batch)> {
        let (turn, [handovers, bulk]) = (self.waiting.turn(), self.taken);
        let places = if turn[0] == Class::Bulk || handovers == 0 { BULK_PLACES } else { 1 };
        for class in turn.into_iter().filter(|class| *class == Class::Handover || bulk < places) {
            // As many as have a place are passed over, at most.
            for _ in 0..if self.free_places > 0 { self.waiting.len(class) } else { 0 } {
                let session = self.waiting.pop(class)?;
                self.waiting.push(class, session);
                let Some(of) = self.sessions.get(&session) else { continue };
                let room = self.free_places.saturating_sub(of.places);
                let room = match class {
                    Class::Handover => room,
                    Class::Bulk => room.min(places.saturating_sub(of.bulk + bulk)),
                };
                if room > 0 {
                    // With as many for each that waits, and as many left free, nobody has more than in turns of one.
                    let shares = self.waiting.len(class) + 1;
                    let one = class == Class::Bulk && handovers > 0;
                    let requests = if one { 1 } else { (room / shares).max(1) };
                    return Some((class, session, Batch { requests, bytes: CLAIM }));
                }
            }
        }
        None
    }

    /// The session has put a work request of so many bytes into this place.
    pub fn take(&mut self, session: u64, place: usize, class: Class, bytes: u64) {
        self.free_places -= 1;
        self.taken[class as usize] += 1;
        self.waiting.took(class, bytes);
        let of = self.sessions.entry(session).or_default();
        of.places += 1;
        of.bulk += usize::from(class == Class::Bulk);
        self.ready(session, place);
    }

    /// It has taken it from there. None of its operations is in flight.
    pub fn give(&mut self, session: u64, place: usize, class: Class) {
        self.not_ready(session, place);
        self.taken[class as usize] -= 1;
        if let Some(of) = self.sessions.get_mut(&session) {
            of.places -= 1;
            of.bulk -= usize::from(class == Class::Bulk);
            self.free_places += 1;
        }
        self.drop_idle(session);
    }

    /// There is something to post for this place of the session.
    pub fn ready(&mut self, session: u64, place: usize) {
        let Some(of) = self.sessions.get_mut(&session).filter(|of| !of.ready.contains(&place)) else {
            return;
        };
        if of.ready.is_empty() {
            of.left = TURN;
            self.posting.push_back(session);
        }
        of.ready.push_back(place);
    }

    /// There is nothing any more, or not now.
    pub fn not_ready(&mut self, session: u64, place: usize) {
        let Some(of) = self.sessions.get_mut(&session) else { return };
        of.ready.retain(|other| *other != place);
        if of.ready.is_empty() {
            self.posting.retain(|other| *other != session);
        }
    }

    /// The place whose next operation is to be posted; None when there is no room for anybody's.
    pub fn next_to_post(&mut self) -> Option<usize> {
        // A connection's queue may be full while another's is not.
        while self.refused < self.posting.len() {
            let of = self.posting.front().and_then(|session| self.sessions.get(session))?;
            if of.operations < self.free_operations {
                return of.ready.front().copied();
            }
            self.full();
        }
        self.refused = 0;
        None
    }

    /// There was no room for it. The session keeps its turn for when there is.
    pub fn full(&mut self) {
        self.refused += 1;
        next(&mut self.posting);
    }

    /// It was posted: so many bytes. The session's next place is next.
    pub fn posted(&mut self, bytes: u64) {
        self.refused = 0;
        let Some(of) = self.posting.front().and_then(|session| self.sessions.get_mut(session)) else {
            return;
        };
        self.free_operations -= 1;
        of.operations += 1;
        of.left -= bytes as i64;
        next(&mut of.ready);
        if of.left <= 0 {
            of.left += TURN;
            next(&mut self.posting);
        }
    }

    /// So many operations of the session are not in flight any more.
    pub fn ended(&mut self, session: u64, operations: usize) {
        if let Some(of) = self.sessions.get_mut(&session) {
            of.operations -= operations;
            self.free_operations += operations;
        }
    }

    /// Operations of the session that are in flight.
    pub fn operations(&self, session: u64) -> usize {
        self.sessions.get(&session).map_or(0, |of| of.operations)
    }

    fn drop_idle(&mut self, session: u64) {
        if self.sessions.get(&session).is_some_and(|of| of.waits == [false; 2] && of.places == 0) {
            self.sessions.remove(&session);
        }
    }
}

/// The first one goes behind the others.
fn next<T>(queue: &mut VecDeque<T>) {
    if !queue.is_empty() {
        queue.rotate_left(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: usize = 32;
    /// Operations of a work request.
    const OPERATIONS: usize = 4;

    /// Sessions that always have work, of operations of so many bytes each.
    struct Nic {
        turns: Turns,
        /// Work requests that it claims at once at most, and has.
        at_once: usize,
        most_claimed: usize,
        bytes: HashMap<u64, u64>,
        /// Of those whose work is bulk.
        classes: HashMap<u64, Class>,
        /// Whose each place is, and how many operations are to be posted and to end.
        places: Vec<Option<(u64, usize, usize)>>,
        /// Oldest first: the place of each.
        in_flight: VecDeque<usize>,
        moved: HashMap<u64, u64>,
    }

    impl Nic {
        fn new(operations: usize, sessions: &[(u64, u64)]) -> Nic {
            let mut nic = Nic {
                turns: Turns::new(PLACES, operations),
                at_once: usize::MAX,
                most_claimed: 0,
                bytes: HashMap::new(),
                classes: HashMap::new(),
                places: vec![None; PLACES],
                in_flight: VecDeque::new(),
                moved: HashMap::new(),
            };
            sessions.iter().for_each(|of| nic.add(*of));
            nic
        }

        fn add(&mut self, (session, bytes): (u64, u64)) {
            self.bytes.insert(session, bytes);
            self.turns.wait(session);
            self.fill();
        }

        /// Claims and posts what there is room for.
        fn fill(&mut self) {
            while let Some((class, session, most)) = self.turns.next_to_claim() {
                if (self.classes.get(&session).copied().unwrap_or_default()) != class {
                    self.turns.wait_no_more(session, class);
                    continue;
                }
                let (mut claimed, mut bytes) = (0, 0);
                while claimed < most.requests.min(self.at_once) && bytes < most.bytes {
                    let place = self.places.iter().position(Option::is_none).unwrap();
                    self.places[place] = Some((session, OPERATIONS, OPERATIONS));
                    let len = OPERATIONS as u64 * self.bytes[&session];
                    self.turns.take(session, place, class, len);
                    (claimed, bytes) = (claimed + 1, bytes + len);
                }
                self.most_claimed = self.most_claimed.max(claimed);
            }
            while let Some(place) = self.turns.next_to_post() {
                let (session, to_post, _) = self.places[place].as_mut().unwrap();
                if *to_post == 0 {
                    self.turns.not_ready(*session, place);
                    continue;
                }
                *to_post -= 1;
                self.turns.posted(self.bytes[session]);
                self.in_flight.push_back(place);
            }
        }

        /// The oldest operation ends that is none of this session's, and what there is room for is claimed.
        fn end(&mut self, but: u64) {
            self.end_one(but);
            self.fill();
        }

        fn end_one(&mut self, but: u64) {
            let theirs = |place: &usize| self.places[*place].is_some_and(|(session, ..)| session != but);
            let at = self.in_flight.iter().position(theirs).unwrap();
            let place = self.in_flight.remove(at).unwrap();
            let (session, _, to_end) = self.places[place].as_mut().unwrap();
            let session = *session;
            *to_end -= 1;
            self.turns.ended(session, 1);
            *self.moved.entry(session).or_default() += self.bytes[&session];
            if *to_end == 0 {
                let class = self.classes.get(&session).copied().unwrap_or_default();
                self.turns.give(session, place, class);
                self.places[place] = None;
            }
        }

        fn places(&self, session: u64) -> usize {
            self.places.iter().flatten().filter(|(of, ..)| *of == session).count()
        }

        fn in_flight(&self, session: u64) -> usize {
            self.turns.operations(session)
        }
    }

    #[test]
    fn one_alone_holds_half_and_what_is_free_is_the_next_ones() {
        let mut nic = Nic::new(64, &[(1, 4096)]);
        assert_eq!((nic.places(1), nic.in_flight(1)), (16, 32));
        // Although nothing of the first one ends.
        nic.add((2, 4096));
        assert_eq!((nic.places(2), nic.in_flight(2)), (8, 16));
        nic.add((3, 4096));
        assert_eq!((nic.places(3), nic.in_flight(3)), (4, 8));
        (0..1000).for_each(|_| nic.end(0));
        // All three have their share then, and a fourth one finds as much.
        for session in 1..=3 {
            assert!((7..=9).contains(&nic.places(session)), "{session}: {}", nic.places(session));
            assert!((14..=17).contains(&nic.in_flight(session)), "{session}: {}", nic.in_flight(session));
        }
        nic.add((4, 4096));
        assert!(nic.places(4) >= 4 && nic.in_flight(4) >= 7);
    }

    #[test]
    fn who_claims_several_at_once_has_no_more_than_one_after_the_other() {
        for sessions in 1..=8 {
            let wanted: Vec<_> = (1..=sessions).map(|session| (session, 4096)).collect();
            let [mut several, mut single] = [usize::MAX, 1].map(|at_once| {
                let mut nic = Nic::new(256, &[]);
                nic.at_once = at_once;
                wanted.iter().for_each(|of| nic.add(*of));
                nic
            });
            for ends in [1, 2, 7, 40, 13, 50, 3] {
                for nic in [&mut several, &mut single] {
                    // All of them end before any work request is claimed.
                    (0..ends).for_each(|_| nic.end_one(0));
                    nic.fill();
                }
                for session in 1..=sessions {
                    let (places, before) = (several.places(session), single.places(session));
                    assert!(places.abs_diff(before) <= 1, "{sessions} sessions: {places}, and {before}");
                }
            }
            assert!(several.most_claimed > 1 && single.most_claimed == 1);
        }
    }

    #[test]
    fn what_is_claimed_at_once_is_bounded_in_bytes_and_bulk_beside_handovers_comes_singly() {
        let mut turns = Turns::new(PLACES, 256);
        turns.wait(1);
        let (class, _, most) = turns.next_to_claim().unwrap();
        assert_eq!((class, most), (Class::Handover, Batch { requests: PLACES / 2, bytes: CLAIM }));
        turns.wait_no_more(1, Class::Handover);
        let (class, _, most) = turns.next_to_claim().unwrap();
        assert_eq!((class, most.requests), (Class::Bulk, BULK_PLACES / 2));
        turns.take(2, 0, Class::Handover, 1);
        let (class, _, most) = turns.next_to_claim().unwrap();
        assert_eq!((class, most.requests), (Class::Bulk, 1));
    }

    #[test]
    fn whoever_is_stuck_keeps_its_share_and_no_more() {
        let mut nic = Nic::new(64, &[(1, 4096), (2, 4096)]);
        let stuck = nic.in_flight(1);
        (0..1000).for_each(|_| nic.end(1));
        assert_eq!((nic.moved.get(&1), nic.moved[&2]), (None, 1000 * 4096));
        assert!(nic.in_flight(1) == stuck && nic.in_flight(2) >= 16);
    }

    #[test]
    fn bulk_has_few_places_and_one_beside_handovers_before_its_turn() {
        const BYTES: u64 = (512 << 10) / OPERATIONS as u64;
        let mut nic = Nic::new(256, &[]);
        nic.classes = HashMap::from([(1, Class::Bulk), (2, Class::Bulk)]);
        nic.add((1, BYTES));
        nic.add((2, BYTES));
        assert_eq!((nic.places(1), nic.places(2)), (4, 2), "one alone has half of what bulk may have");
        // A handover comes, and finds most places free.
        nic.add((3, BYTES));
        assert!(nic.places(3) >= 12, "{}", nic.places(3));
        (0..100).for_each(|_| nic.end(0));
        nic.moved.clear();
        (0..100_000).for_each(|_| nic.end(0));
        let moved = |session| nic.moved[&session];
        let (bulk, all) = (moved(1) + moved(2), moved(1) + moved(2) + moved(3));
        assert!(bulk * 10 >= all && bulk * 8 <= all, "bulk got {bulk} of {all}");
        assert!(moved(1).abs_diff(moved(2)) * 10 <= moved(1), "{} and {}", moved(1), moved(2));
        // Handovers that are stuck keep nothing from bulk but places.
        nic.moved.clear();
        (0..100).for_each(|_| nic.end(3));
        assert_eq!(nic.moved[&1] + nic.moved[&2], 100 * BYTES);
    }

    #[test]
    fn many_take_turns_and_nobody_is_passed_over() {
        let mut nic = Nic::new(256, &(1..=100).map(|session| (session, 4096)).collect::<Vec<_>>());
        // Those that were there first hold more at first.
        (0..1000).for_each(|_| nic.end(0));
        nic.moved.clear();
        (0..10_000).for_each(|_| nic.end(0));
        let moved = |session| nic.moved.get(&session).copied().unwrap_or_default() / 4096;
        let (least, most) = ((1..=100).map(moved).min().unwrap(), (1..=100).map(moved).max().unwrap());
        assert!(least > 0 && most - least <= 8, "{least} to {most}");
    }

    #[test]
    fn turns_are_of_bytes_when_operations_are_of_any_length() {
        let mut turns = Turns::new(PLACES, 1 << 20);
        let bytes = [0, 4096, 1 << 20, 700 << 10];
        (1..=3).for_each(|session| turns.take(session, session as usize, Class::Handover, 1));
        let mut posted = [0; 4];
        for _ in 0..3000 {
            let place = turns.next_to_post().unwrap();
            posted[place] += bytes[place];
            turns.posted(bytes[place]);
        }
        let (least, most) = (*posted[1..].iter().min().unwrap(), *posted[1..].iter().max().unwrap());
        assert!(most - least <= 2 * LONGEST, "{posted:?}");
    }

    #[test]
    fn a_full_queue_costs_its_session_its_turn_and_nobody_else() {
        let mut turns = Turns::new(PLACES, 1 << 20);
        turns.take(1, 1, Class::Handover, 1);
        turns.take(2, 2, Class::Handover, 1);
        for _ in 0..10 {
            assert_eq!(turns.next_to_post(), Some(1));
            turns.full();
            assert_eq!(turns.next_to_post(), Some(2));
            turns.full();
            assert_eq!(turns.next_to_post(), None);
        }
        assert_eq!(turns.next_to_post(), Some(1));
        turns.full();
        assert_eq!(turns.next_to_post(), Some(2));
        turns.posted(1);
        turns.not_ready(2, 2);
        assert_eq!(turns.next_to_post(), Some(1));
        turns.not_ready(1, 1);
        assert_eq!(turns.next_to_post(), None);
        turns.ended(2, 1);
        turns.give(1, 1, Class::Handover);
        turns.give(2, 2, Class::Handover);
        assert!(turns.sessions.is_empty() && turns.posting.is_empty());
    }
}
