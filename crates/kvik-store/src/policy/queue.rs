//! Queues of block ids, linked through one array: no allocation a block, every step in constant time.

/// No block.
pub(super) const NONE: u32 = u32::MAX;

/// The neighbours of each block in the one queue that it may stand in: the newer one, then the older one.
#[derive(Default)]
pub(super) struct Links {
    links: Vec<[u32; 2]>,
}

/// Both ends of a queue.
#[derive(Clone, Copy)]
pub(super) struct Queue {
    newest: u32,
    oldest: u32,
}

impl Queue {
    pub(super) const fn new() -> Queue {
        Queue { newest: NONE, oldest: NONE }
    }

    /// The block that has stood in it longest.
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

impl Links {
    /// Makes room for a block.
    pub(super) fn grow(&mut self, id: u32) {
        grow(&mut self.links, id, [NONE; 2]);
    }

    /// Puts a block, which stands in no queue, at the newest end.
    pub(super) fn push_newest(&mut self, queue: &mut Queue, id: u32) {
        self.links[id as usize] = [NONE, queue.newest];
        match queue.newest {
            NONE => queue.oldest = id,
            newest => self.links[newest as usize][0] = id,
        }
        queue.newest = id;
    }

    /// Puts a block, which stands in no queue, at the oldest end.
    pub(super) fn push_oldest(&mut self, queue: &mut Queue, id: u32) {
        self.links[id as usize] = [queue.oldest, NONE];
        match queue.oldest {
            NONE => queue.newest = id,
            oldest => self.links[oldest as usize][1] = id,
        }
        queue.oldest = id;
    }

    /// Takes a block out of the queue that it stands in.
    pub(super) fn unlink(&mut self, queue: &mut Queue, id: u32) {
        let [newer, older] = self.links[id as usize];
        match newer {
            NONE => queue.newest = older,
            newer => self.links[newer as usize][1] = older,
        }
        match older {
            NONE => queue.oldest = newer,
            older => self.links[older as usize][0] = newer,
        }
    }

    /// Bytes that it takes.
    pub(super) fn memory(&self) -> usize {
        self.links.capacity() * size_of::<[u32; 2]>()
    }
}

/// Lets an array reach `id`. It grows by an eighth, not to the double: at millions of blocks the spare part counts.
pub(super) fn grow<T: Clone>(array: &mut Vec<T>, id: u32, empty: T) {
    let len = id as usize + 1;
    if len > array.capacity() {
        let spare = (array.len() / 8).max(64);
        array.reserve_exact(len.max(array.len() + spare) - array.len());
    }
    if len > array.len() {
        array.resize(len, empty);
    }
}
