//! Who shares the store: namespaces, and the tenants that have them.
//!
//! A namespace has one shape and one tenant from its first use on. Tenants with a quota have a share of their own:
//! their blocks make room for their own only. All others share what is left.
//!
//! There are [`MOST`] namespaces at most, and more may come: the longest-unused ones are forgotten then, and who asks for
//! one of them opens it again. A tenant without options goes with the last of its namespaces.
//!
//! Invariant: the number of a namespace becomes another one's only when no block has it, and nobody works with it ([`Held`]).

use crate::index::{Id, Index};
use crate::tier::Identity;
use crate::{Namespace, NamespaceId, Shape};
use kvik_core::{Code, Error, Result};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The most namespaces of a store, and the most tenants with options.
const MOST: usize = 4096;
/// Namespaces that are forgotten at once: the tiers below are told of them, and that takes as long for one.
const AT_ONCE: usize = 64;
/// The longest name of a tenant, in bytes.
const MAX_NAME: usize = 128;
/// Tenants without options that have figures of their own: names come from clients, and series must stay few.
const MOST_SERIES: usize = 64;
/// The name under which all other tenants are counted together.
const OTHER: &str = "other";

/// What is known of a namespace.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub id: NamespaceId,
    pub shape: Shape,
    pub tenant: u16,
    /// The model's name, for people.
    pub model: String,
}

/// A namespace, and who uses it.
#[derive(Debug)]
struct Entered {
    known: Known,
    /// How many times some namespace had been used when this one was last.
    used: u64,
    /// Those who work with it hold it, too.
    held: Arc<()>,
}

/// A namespace that somebody works with: its number means no other one meanwhile.
#[derive(Debug)]
pub(crate) struct Held {
    number: u16,
    _held: Arc<()>,
}

impl Held {
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// What a tenant may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantOptions {
    /// Its name.
    pub name: String,
    /// Bytes of memory that its blocks take at most; none: it shares what others leave.
    pub quota: Option<u64>,
    /// Its blocks lie in regions of their own, so that no client which reads another tenant's blocks over a NIC can
    /// reach them.
    pub apart: bool,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    /// By their numbers; those that were forgotten are in `free`.
    namespaces: Vec<Entered>,
    free: Vec<u16>,
    by_id: HashMap<NamespaceId, u16>,
    /// Times that some namespace was used.
    uses: u64,
    /// By their numbers, those with options first; those that were forgotten are in `free_tenants`.
    tenants: Vec<TenantOptions>,
    /// How many have options.
    known: u16,
    free_tenants: Vec<u16>,
    by_name: HashMap<String, u16>,
    /// The series of each tenant's figures.
    series: Vec<u16>,
    /// The name of each series.
    series_names: Vec<String>,
    /// Tenants without options that have a series.
    unknown: usize,
}

impl Tenants {
    /// Those that are known from the start; all others have no quota.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that is empty, too long or there twice, a quota of 0, or too many.
    pub fn new(options: &[TenantOptions]) -> Result<Tenants> {
        let mut tenants = Tenants { series_names: vec![OTHER.to_owned()], ..Tenants::default() };
        for one in options {
            if tenants.by_name.contains_key(&one.name) || one.quota == Some(0) {
                let text = format!("tenant {:?} is named twice, or has a quota of 0 bytes", one.name);
                return Err(Error::new(Code::InvalidArgument, text));
            }
            if tenants.tenants.len() >= MOST {
                let text = format!("more than {MOST} tenants have options: leave out those that need none");
                return Err(Error::new(Code::InvalidArgument, text));
            }
            tenants.enter(one.clone(), true)?;
            tenants.known += 1;
        }
        Ok(tenants)
    }

    fn enter(&mut self, options: TenantOptions, known: bool) -> Result<u16> {
        let name = &options.name;
        if name.is_empty() || name.len() > MAX_NAME || name.contains(|c: char| c.is_control()) {
            let text =
                format!("a tenant's name has 1 to {MAX_NAME} bytes and no control characters, not {name:?}");
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let series = self.series_for(name, known);
        let number = self.free_tenants.pop().unwrap_or(self.tenants.len() as u16);
        self.by_name.insert(name.clone(), number);
        if usize::from(number) == self.tenants.len() {
            self.tenants.push(options);
            self.series.push(series);
        } else {
            self.tenants[usize::from(number)] = options;
            self.series[usize::from(number)] = series;
        }
        Ok(number)
    }

    /// The series of a tenant that is entered: one that was here before has the same.
    fn series_for(&mut self, name: &str, known: bool) -> u16 {
        if let Some(before) = self.series_names.iter().position(|other| other == name) {
            return before as u16;
        }
        if !known && self.unknown >= MOST_SERIES {
            return 0;
        }
        self.unknown += usize::from(!known);
        self.series_names.push(name.to_owned());
        (self.series_names.len() - 1) as u16
    }

    /// The number of a namespace, which is entered if it is new.
    ///
    /// # Errors
    /// `ShapeMismatch` where its blocks have another shape, `InvalidArgument` where it belongs to another tenant,
    /// `MemoryCapReached` for too many: see [`Tenants::unused`].
    pub fn open(&mut self, id: NamespaceId, tenant: &str, shape: Shape, model: &str) -> Result<u16> {
        if let Some(number) = self.by_id.get(&id).copied() {
            self.uses(number);
            let known = self.namespace(number);
            if known.shape != shape {
                let text = format!(
                    "namespace {id} has blocks of {} here, not of {shape}: one of the two says something wrong of its layout",
                    known.shape
                );
                return Err(Error::new(Code::ShapeMismatch, text));
            }
            if self.tenants[usize::from(known.tenant)].name != tenant {
                let text =
                    format!("namespace {id} is not tenant {tenant:?}'s: give each tenant a salt of its own");
                return Err(Error::new(Code::InvalidArgument, text));
            }
            return Ok(number);
        }
        if self.is_full_for(&id) {
            let text =
                format!("the store knows {MOST} namespaces, and none of them can go now: ask again later");
            return Err(Error::new(Code::MemoryCapReached, text));
        }
        let tenant = match self.by_name.get(tenant) {
            Some(tenant) => *tenant,
            None => {
                let options = TenantOptions { name: tenant.to_owned(), quota: None, apart: false };
                self.enter(options, false)?
            }
        };
        let known = Known { id, shape, tenant, model: model.to_owned() };
        let entered = Entered { known, used: 0, held: Arc::default() };
        let number = match self.free.pop() {
            Some(number) => {
                self.namespaces[usize::from(number)] = entered;
                number
            }
            None => {
                self.namespaces.push(entered);
                (self.namespaces.len() - 1) as u16
            }
        };
        self.by_id.insert(id, number);
        self.uses(number);
        Ok(number)
    }

    fn uses(&mut self, number: u16) {
        self.uses += 1;
        self.namespaces[usize::from(number)].used = self.uses;
    }

    /// Whether others have to be forgotten before this one is entered.
    pub fn is_full_for(&self, id: &NamespaceId) -> bool {
        self.by_id.len() >= MOST && !self.by_id.contains_key(id)
    }

    /// Which are best forgotten, some at once. Those of the longer-unused half that are `empty`; where all of them have
    /// blocks, the longest-unused of the tenant that has most, so that one who opens many takes from itself. Nobody works
    /// with them, and they are not `kept`.
    pub fn unused(&self, empty: impl Fn(u16) -> bool, kept: &HashSet<u16>) -> Vec<NamespaceId> {
        let of = |number: &u16| &self.namespaces[usize::from(*number)];
        let mut by_age: Vec<u16> = self.by_id.values().copied().collect();
        by_age.sort_unstable_by_key(|number| of(number).used);
        let mut counts: HashMap<u16, usize> = HashMap::new();
        by_age.iter().for_each(|number| *counts.entry(of(number).known.tenant).or_default() += 1);
        // Of several the longest-unused.
        let most =
            by_age.iter().rev().map(|number| of(number).known.tenant).max_by_key(|tenant| counts[tenant]);
        let may_go = |number: &u16| Arc::strong_count(&of(number).held) == 1 && !kept.contains(number);
        let older = by_age[..by_age.len() / 2].iter().filter(|number| may_go(number) && empty(**number));
        let mut unused: Vec<u16> = older.copied().collect();
        if unused.is_empty() {
            by_age.retain(|number| may_go(number) && Some(of(number).known.tenant) == most);
            unused = by_age;
        }
        unused.iter().take(AT_ONCE).map(|number| of(number).known.id).collect()
    }

    /// Forgets those of them that are `empty` and that nobody works with.
    pub fn forget(&mut self, ids: &[NamespaceId], empty: impl Fn(u16) -> bool) {
        for id in ids {
            let Some(number) = self.find(id) else { continue };
            if empty(number) && Arc::strong_count(&self.namespaces[usize::from(number)].held) == 1 {
                self.by_id.remove(id);
                self.free.push(number);
                self.forget_tenant(self.namespace(number).tenant);
            }
        }
    }

    /// Forgets a tenant without options that has no namespace any more: names come from clients.
    fn forget_tenant(&mut self, tenant: u16) {
        let has = |number: &u16| self.namespace(*number).tenant == tenant;
        if tenant >= self.known && !self.by_id.values().any(has) {
            self.by_name.remove(&self.tenants[usize::from(tenant)].name);
            self.free_tenants.push(tenant);
        }
    }

    /// A namespace that was entered, for who is about to work with it.
    pub fn hold(&mut self, id: &NamespaceId) -> Option<Held> {
        let number = self.find(id)?;
        self.uses(number);
        Some(Held { number, _held: self.namespaces[usize::from(number)].held.clone() })
    }

    /// The number of a namespace that was entered.
    pub fn find(&self, id: &NamespaceId) -> Option<u16> {
        self.by_id.get(id).copied()
    }

    pub fn namespace(&self, number: u16) -> &Known {
        &self.namespaces[usize::from(number)].known
    }

    /// How bytes of its blocks are divided.
    pub fn shape(&self, namespace: u16) -> Shape {
        self.namespace(namespace).shape
    }

    /// What a block is.
    pub fn identity(&self, index: &Index, id: Id) -> Identity {
        let node = index.node(id);
        let known = self.namespace(node.namespace);
        let parent = index.parent(id).map(|parent| index.node(parent).key);
        Identity { key: node.key, parent, namespace: known.id, shape: known.shape }
    }

    /// All namespaces, by their numbers; also what was forgotten, until its number is another one's: its tenant may have
    /// become another one meanwhile.
    pub fn namespaces(&self) -> impl ExactSizeIterator<Item = &Known> {
        self.namespaces.iter().map(|entered| &entered.known)
    }

    /// The tenant of a namespace.
    pub fn tenant(&self, namespace: u16) -> &TenantOptions {
        &self.tenants[usize::from(self.namespace(namespace).tenant)]
    }

    /// All tenants, by their numbers.
    pub fn tenants(&self) -> &[TenantOptions] {
        &self.tenants
    }

    /// The series that the figures of a namespace's tenant are in. Those that are known from the start have one of their
    /// own, and so have the first others; the rest share the first series.
    pub fn series(&self, namespace: u16) -> u16 {
        self.series[usize::from(self.namespace(namespace).tenant)]
    }

    /// The name of each series.
    pub fn series_names(&self) -> &[String] {
        &self.series_names
    }
}

impl Namespace {
    /// What people read of it.
    pub(crate) fn words(&self) -> String {
        format!("{}@{}", self.model, self.revision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_somebody_works_with_means_the_same_namespace() {
        let (mut tenants, shape) = (Tenants::new(&[]).unwrap(), Shape::new(1, 1, 64).unwrap());
        let id = |number: u16| {
            let mut id = [0; 32];
            id[..2].copy_from_slice(&number.to_le_bytes());
            NamespaceId(id)
        };
        for number in 0..MOST as u16 {
            assert_eq!(tenants.open(id(number), "one", shape, "m").unwrap(), number);
        }
        let (held, new) = (tenants.hold(&id(0)).unwrap(), id(MOST as u16));
        assert!(tenants.is_full_for(&new) && !tenants.is_full_for(&id(5)));
        assert_eq!(tenants.open(new, "one", shape, "m").unwrap_err().code, Code::MemoryCapReached);
        // It was used last: then all others are younger than it.
        (1..MOST as u16).for_each(|number| drop(tenants.hold(&id(number))));
        let unused = tenants.unused(|_| true, &HashSet::from([1]));
        assert_eq!((unused.len(), unused[0]), (AT_ONCE, id(2)));
        tenants.forget(&[id(0), id(2)], |_| true);
        assert_eq!((tenants.find(&id(0)), tenants.find(&id(2))), (Some(held.number()), None));
        assert_eq!(tenants.open(new, "one", shape, "m").unwrap(), 2);
        drop(held);
        tenants.forget(&[id(0)], |_| true);
        assert_eq!(tenants.find(&id(0)), None);
    }

    #[test]
    fn a_tenant_that_comes_again_has_the_series_that_it_had() {
        let known = TenantOptions { name: "known".into(), quota: Some(1), apart: false };
        let (mut tenants, shape) = (Tenants::new(&[known]).unwrap(), Shape::new(1, 1, 64).unwrap());
        let open = |tenants: &mut Tenants, id: u8, tenant: &str| {
            let number = tenants.open(NamespaceId([id; 32]), tenant, shape, "m").unwrap();
            (tenants.namespace(number).tenant, tenants.series(number))
        };
        assert_eq!((open(&mut tenants, 1, "a"), open(&mut tenants, 2, "known")), ((1, 2), (0, 1)));
        assert_eq!(open(&mut tenants, 3, "a"), (1, 2));
        tenants.forget(&[NamespaceId([1; 32]), NamespaceId([2; 32])], |_| true);
        assert_eq!((tenants.by_name.get("a"), tenants.by_name.get("known")), (Some(&1), Some(&0)));
        tenants.forget(&[NamespaceId([3; 32])], |_| true);
        assert_eq!(tenants.by_name.get("a"), None);
        assert_eq!((open(&mut tenants, 4, "b"), open(&mut tenants, 5, "a")), ((1, 3), (2, 2)));
        assert_eq!(tenants.series_names(), ["other", "known", "a", "b"]);
    }

    #[test]
    fn figures_have_few_names_and_tenants_of_the_options_always_one() {
        let known = |name: &str| TenantOptions { name: name.to_owned(), quota: Some(1), apart: false };
        let mut tenants = Tenants::new(&[known("a"), known("b")]).unwrap();
        let shape = Shape::new(1, 1, 64).unwrap();
        let mut open = |number: u8, tenant: &str| {
            let namespace = tenants.open(NamespaceId([number; 32]), tenant, shape, "m").unwrap();
            let series = tenants.series(namespace);
            tenants.series_names()[usize::from(series)].clone()
        };
        assert_eq!(open(0, "b"), "b");
        assert_eq!(open(1, "other"), "other");
        for number in 0..MOST_SERIES as u8 {
            let name = format!("tenant {number}");
            assert_eq!(open(number + 2, &name), name);
        }
        assert_eq!(open(100, "one too many"), "other");
        assert_eq!(open(101, "tenant 3"), "tenant 3");
        assert_eq!(open(102, "a"), "a");
        assert_eq!(tenants.series_names().len(), 1 + 2 + MOST_SERIES);
    }
}
