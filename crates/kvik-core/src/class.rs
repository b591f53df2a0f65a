//! Classes of transfers, and how what waits is served by them.

use std::collections::VecDeque;
use std::fmt;

/// How many bytes of handovers go for one of bulk, while both wait: bulk keeps a ninth, so that it is never under a
/// tenth over any stretch that is long beside [`LEAD`].
const WEIGHT: i64 = 8;
/// So many bytes of handovers go before the first of bulk: a handover of a usual size goes as a whole.
const LEAD: i64 = 4 << 20;

/// What a transfer is for, and so which one goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Class {
    /// A request waits for it.
    #[default]
    Handover,
    /// Nobody waits for it: a store's copy, a prefetch. It takes what handovers leave, and a tenth in any case.
    Bulk,
}

impl Class {
    /// Both, in their order.
    pub const ALL: [Class; 2] = [Class::Handover, Class::Bulk];

    /// The word for it in options, reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Class::Handover => "handover",
            Class::Bulk => "bulk",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What waits for its turn: a queue for each class, and a counter of bytes that says which of them is served. There is
/// no clock in it.
///
/// Whoever serves looks at [`ClassQueue::turn`], takes from the first class that has something for it, and tells with
/// [`ClassQueue::took`] how many bytes that was.
#[derive(Debug)]
pub struct ClassQueue<T> {
    waiting: [VecDeque<T>; 2],
    /// Bytes of handovers that went while bulk waited, less [`WEIGHT`] times those of bulk.
    ahead: i64,
}

impl<T> Default for ClassQueue<T> {
    fn default() -> Self {
        ClassQueue { waiting: [VecDeque::new(), VecDeque::new()], ahead: 0 }
    }
}

impl<T: PartialEq> ClassQueue<T> {
    /// It waits behind all others of its class.
    pub fn push(&mut self, class: Class, item: T) {
        self.waiting[class as usize].push_back(item);
    }

    /// It waits behind all others of its class, unless it does already.
    pub fn push_once(&mut self, class: Class, item: T) {
        if !self.waiting[class as usize].contains(&item) {
            self.push(class, item);
        }
    }

    /// It keeps its place: it was taken, and could not be served.
    pub fn put_back(&mut self, class: Class, item: T) {
        self.waiting[class as usize].push_front(item);
    }

    /// It waits no longer, if it does.
    pub fn remove(&mut self, class: Class, item: &T) {
        self.waiting[class as usize].retain(|waiting| waiting != item);
    }

    /// The next one of a class.
    pub fn pop(&mut self, class: Class) -> Option<T> {
        self.waiting[class as usize].pop_front()
    }

    /// How many of a class wait.
    pub fn len(&self, class: Class) -> usize {
        self.waiting[class as usize].len()
    }

    /// The next one of a class, which waits again behind all others of it.
    pub fn rotate(&mut self, class: Class) -> Option<T>
    where
        T: Copy,
    {
        let item = self.pop(class)?;
        self.push(class, item);
        Some(item)
    }

    /// Whether something of a class waits.
    pub fn waits(&self, class: Class) -> bool {
        !self.waiting[class as usize].is_empty()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        Class::ALL.iter().all(|class| !self.waits(*class))
    }

    /// In which order the classes are to be tried now.
    pub fn turn(&self) -> [Class; 2] {
        match self.ahead >= LEAD {
            true => [Class::Bulk, Class::Handover],
            false => Class::ALL,
        }
    }

    /// So many bytes of a class were served. What one class is served while the other one has nothing counts neither for
    /// it nor against it.
    pub fn took(&mut self, class: Class, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX / WEIGHT);
        self.ahead = match class {
            Class::Handover if self.waits(Class::Bulk) => self.ahead.saturating_add(bytes),
            Class::Handover => self.ahead.min(0),
            // Nothing more is owed for what went when handovers could not go.
            Class::Bulk if self.waits(Class::Handover) => self.ahead.max(0).saturating_sub(bytes * WEIGHT),
            Class::Bulk => 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Serves so many bytes, with all that was pushed always waiting again: what each item got.
    fn serve(queue: &mut ClassQueue<u32>, sizes: &HashMap<u32, u64>, bytes: u64) -> Vec<(Class, u32)> {
        let (mut served, mut total) = (Vec::new(), 0);
        while total < bytes {
            let next = queue.turn().into_iter().find_map(|class| Some((class, queue.pop(class)?)));
            let Some((class, item)) = next else { break };
            queue.push(class, item);
            queue.took(class, sizes[&item]);
            total += sizes[&item];
            served.push((class, item));
        }
        served
    }

    fn bytes_of(served: &[(Class, u32)], sizes: &HashMap<u32, u64>, item: u32) -> u64 {
        served.iter().filter(|(_, one)| *one == item).map(|_| sizes[&item]).sum()
    }

    #[test]
    fn handovers_go_first_and_bulk_keeps_a_tenth_whatever_the_sizes_of_chunks() {
        for (handover, bulk) in [(512, 512), (64, 1024), (1024, 64), (16, 4096), (4096, 16)] {
            let sizes = HashMap::from([(1, handover << 10), (2, bulk << 10)]);
            let mut queue = ClassQueue::default();
            queue.push(Class::Bulk, 2);
            queue.push(Class::Handover, 1);
            let served = serve(&mut queue, &sizes, 1 << 30);
            let first = served.iter().take_while(|(class, _)| *class == Class::Handover).count() as u64;
            assert!(first * sizes[&1] >= 4 << 20, "{handover}, {bulk}: only {first} chunks went first");
            // At every moment, but for the bytes that handovers are ahead.
            let (mut total, mut got) = (0, 0);
            for (class, item) in &served {
                total += sizes[item];
                got += if *class == Class::Bulk { sizes[item] } else { 0 };
                let slack = (LEAD as u64) + 9 * sizes[&1].max(sizes[&2]);
                assert!(got * 10 + slack >= total, "{handover}, {bulk}: bulk got {got} of {total}");
            }
            assert!(got * 10 >= total && got * 8 <= total, "{handover}, {bulk}: bulk got {got} of {total}");
        }
    }

    #[test]
    fn two_of_a_class_take_turns() {
        let sizes = HashMap::from([(1, 1 << 19), (2, 1 << 19), (3, 1 << 19), (4, 1 << 19)]);
        let mut queue = ClassQueue::default();
        (1..=2).for_each(|item| queue.push(Class::Handover, item));
        (3..=4).for_each(|item| queue.push(Class::Bulk, item));
        let served = serve(&mut queue, &sizes, 1 << 30);
        for (one, other) in [(1, 2), (3, 4)] {
            let (one, other) = (bytes_of(&served, &sizes, one), bytes_of(&served, &sizes, other));
            assert!(one.abs_diff(other) <= 1 << 19, "{one} and {other}");
        }
    }

    #[test]
    fn what_went_alone_is_owed_to_nobody() {
        let mut queue = ClassQueue::default();
        // Bulk alone for long, then a handover: it goes at once, and for as long as any.
        queue.push(Class::Bulk, 1);
        queue.took(Class::Bulk, 1 << 40);
        queue.push(Class::Handover, 2);
        assert_eq!(queue.turn()[0], Class::Handover);
        queue.took(Class::Handover, LEAD as u64);
        assert_eq!(queue.turn()[0], Class::Bulk);
        // A handover alone for long, then bulk: no debt is called in.
        let mut queue = ClassQueue::default();
        queue.push(Class::Handover, 2);
        queue.took(Class::Handover, u64::MAX);
        queue.push(Class::Bulk, 1);
        assert_eq!(queue.turn()[0], Class::Handover);
    }

    #[test]
    fn what_could_not_be_served_keeps_its_place() {
        let mut queue = ClassQueue::default();
        (1..=3).for_each(|item| queue.push_once(Class::Bulk, item));
        queue.push_once(Class::Bulk, 2);
        let first = queue.pop(Class::Bulk).unwrap();
        queue.put_back(Class::Bulk, first);
        let order: Vec<i32> = std::iter::from_fn(|| queue.pop(Class::Bulk)).collect();
        assert_eq!(order, [1, 2, 3]);
        assert!(queue.is_empty());
        (1..=3).for_each(|item| queue.push(Class::Bulk, item));
        queue.remove(Class::Bulk, &2);
        assert_eq!((queue.pop(Class::Bulk), queue.pop(Class::Bulk)), (Some(1), Some(3)));
    }
}
