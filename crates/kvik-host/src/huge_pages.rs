//! Huge pages: what the machine has, and whether an allocation gets any.
//!
//! Two kinds exist. A *pool* is set aside by the administrator (`vm.nr_hugepages`): what there is of it is the machine's,
//! of which a container may be allowed less, so kvik takes the pages when it makes the memory, and does without where it
//! gets none. *Transparent* huge pages are given when the kernel finds some, and a mapping can only ask. kvik takes a pool
//! when there is one with room, else asks.

use std::fs;

/// What the caller wants of huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// A pool if one has room, else transparent ones if the kernel gives them, else ordinary pages.
    #[default]
    Auto,
    /// Ordinary pages.
    Never,
    /// A pool, or an error.
    Require,
}

/// One pool of huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Bytes of a page.
    pub page_size: usize,
    /// Pages set aside.
    pub total: usize,
    /// Pages neither used nor promised.
    pub available: usize,
}

/// The huge pages of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HugePageFacts {
    /// The pools, largest page first.
    pub pools: Vec<Pool>,
    /// Mode of transparent huge pages for private memory, e.g. `madvise`; empty if the kernel has none.
    pub transparent: String,
    /// Mode for shared memory, e.g. `advise`; empty if the kernel has none.
    pub transparent_shared: String,
}

const POOLS: &str = "/sys/kernel/mm/hugepages";
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";

/// A pool is used for at least this many of its pages, so that rounding up wastes at most an eighth.
const FEWEST_PAGES: usize = 8;

impl HugePageFacts {
    /// Reads what the kernel says. What cannot be read counts as not there.
    pub fn read() -> HugePageFacts {
        let mut pools: Vec<Pool> = fs::read_dir(POOLS)
            .map(|entries| entries.flatten().filter_map(|e| pool(&e.file_name().to_string_lossy())).collect())
            .unwrap_or_default();
        pools.sort_by_key(|p| std::cmp::Reverse(p.page_size));
        HugePageFacts { pools, transparent: mode("enabled"), transparent_shared: mode("shmem_enabled") }
    }

    /// The pool to take `len` bytes from, or why there is none.
    pub fn choose(&self, len: usize) -> Result<Pool, String> {
        let mut why = String::from("this machine has no pool of huge pages; set vm.nr_hugepages to make one");
        for pool in self.pools.iter().filter(|p| p.total > 0) {
            let pages = len.div_ceil(pool.page_size);
            let size = pool.page_size >> 10;
            if pages < FEWEST_PAGES && !len.is_multiple_of(pool.page_size) {
                why = format!("{len} bytes are too few for pages of {size} KiB");
            } else if pages > pool.available {
                let have = pool.available;
                why = format!(
                    "{pages} pages of {size} KiB are needed and {have} are free; raise vm.nr_hugepages"
                );
            } else {
                return Ok(*pool);
            }
        }
        Err(why)
    }

    /// Whether shared memory gets transparent huge pages when it asks.
    pub fn shared_on_request(&self) -> bool {
        matches!(self.transparent_shared.as_str(), "always" | "within_size" | "advise" | "force")
    }
}

fn pool(name: &str) -> Option<Pool> {
    let kib: usize = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    let count = |file: &str| -> Option<usize> {
        fs::read_to_string(format!("{POOLS}/{name}/{file}")).ok()?.trim().parse().ok()
    };
    let free = count("free_hugepages")?;
    let promised = count("resv_hugepages").unwrap_or(0);
    let page_size = kib.checked_mul(1024).filter(|size| size.is_power_of_two())?;
    Some(Pool { page_size, total: count("nr_hugepages")?, available: free.saturating_sub(promised) })
}

/// The chosen one of a file like `always [madvise] never`.
fn mode(file: &str) -> String {
    let text = fs::read_to_string(format!("{TRANSPARENT}/{file}")).unwrap_or_default();
    text.split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
        .unwrap_or_default()
        .to_string()
}
