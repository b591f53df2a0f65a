//! What has happened in a store, in numbers.

use crate::figures::Where;

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident;)*) => {
        /// Counters since the store began, and what is here now.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Counts {
            /// All of them with their names.
            pub fn values(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }

            /// Adds those of another store.
            pub(crate) fn add(&mut self, other: &Counts) {
                $(self.$name += other.$name;)*
            }

            /// Sets one by its name; a name that is not known changes nothing.
            pub(crate) fn set(&mut self, name: &str, value: u64) {
                match name {
                    $(stringify!($name) => self.$name = value,)*
                    _ => {}
                }
            }
        }
    };
}

counts! {
    /// Blocks that are known.
    blocks;
    /// Bytes of the blocks in memory.
    memory_bytes;
    /// Bytes of the memory that is taken for them.
    memory_taken;
    /// Blocks that were stored.
    stored;
    /// Blocks of puts that were here already, or that somebody else was bringing.
    known;
    /// Blocks of puts that were refused since the one before them was not here.
    refused_orphan;
    /// Blocks of puts that were refused since nothing could go for them.
    refused_room;
    /// Times that a block of a put was not worth another one's place, of `refused_room`.
    not_admitted;
    /// Blocks of puts whose bytes did not come.
    refused_lost;
    /// Blocks that were asked for, and read.
    hits;
    /// Blocks that were asked for and not here, or behind one that was not.
    misses;
    /// Copies in memory that went for others.
    evicted;
    /// Blocks that were taken out by somebody's wish.
    removed;
    /// Blocks that were written to the log.
    written;
    /// Blocks that stay in memory only, since the log was too slow for them or refused them.
    unwritten;
    /// Blocks that were brought back from the log.
    loaded;
    /// Blocks that are gone since the log, or the object store, had no room for them any more.
    dropped;
    /// Blocks whose bytes were not those that were stored.
    corrupt;
    /// Blocks that were taken up for the object store.
    object_written;
    /// Blocks that do not come to the object store, since it was too slow for them or refused them.
    object_unwritten;
    /// Blocks that were brought back from the object store.
    object_loaded;
}

impl Counts {
    /// Blocks that do not come to a tier below memory.
    pub(crate) fn unwritten_to(&mut self, tier: Where) -> &mut u64 {
        if tier == Where::Object { &mut self.object_unwritten } else { &mut self.unwritten }
    }

    /// Blocks that were brought back from one.
    pub(crate) fn loaded_from(&mut self, tier: Where) -> &mut u64 {
        if tier == Where::Object { &mut self.object_loaded } else { &mut self.loaded }
    }
}
