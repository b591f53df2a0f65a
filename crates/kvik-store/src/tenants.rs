//! Who shares the store: namespaces, and the tenants that have them.
//!
//! A namespace has one shape and one tenant from its first use on. Tenants with a quota have a share of their own:
//! their blocks make room for their own only. All others share what is left.

use crate::{Namespace, NamespaceId, Shape};
use kvik_core::{Code, Error, Result};
use std::collections::HashMap;

/// The most namespaces of a store, and the most tenants.
const MOST: usize = 4096;
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
    namespaces: Vec<Known>,
    by_id: HashMap<NamespaceId, u16>,
    tenants: Vec<TenantOptions>,
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
    /// `InvalidArgument` for a name that is empty, too long or there twice, or a quota of 0.
    pub fn new(options: &[TenantOptions]) -> Result<Tenants> {
        let mut tenants = Tenants { series_names: vec![OTHER.to_owned()], ..Tenants::default() };
        for one in options {
            if tenants.by_name.contains_key(&one.name) || one.quota == Some(0) {
                let text = format!("tenant {:?} is named twice, or has a quota of 0 bytes", one.name);
                return Err(Error::new(Code::InvalidArgument, text));
            }
            tenants.enter(one.clone(), true)?;
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
        if self.tenants.len() >= MOST {
            return Err(full("tenants"));
        }
        let number = self.tenants.len() as u16;
        self.by_name.insert(name.clone(), number);
        let own = name != OTHER && (known || self.unknown < MOST_SERIES);
        self.unknown += usize::from(own && !known);
        self.series.push(if own { self.series_names.len() as u16 } else { 0 });
        if own {
            self.series_names.push(name.clone());
        }
        self.tenants.push(options);
        Ok(number)
    }

    /// The number of a namespace, which is entered if it is new.
    ///
    /// # Errors
    /// `ShapeMismatch` where its blocks have another shape, `InvalidArgument` where it belongs to another tenant,
    /// `MemoryCapReached` for too many.
    pub fn open(&mut self, id: NamespaceId, tenant: &str, shape: Shape, model: &str) -> Result<u16> {
        if let Some(number) = self.by_id.get(&id) {
            let known = &self.namespaces[usize::from(*number)];
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
            return Ok(*number);
        }
        if self.namespaces.len() >= MOST {
            return Err(full("namespaces"));
        }
        let tenant = match self.by_name.get(tenant) {
            Some(tenant) => *tenant,
            None => {
                let options = TenantOptions { name: tenant.to_owned(), quota: None, apart: false };
                self.enter(options, false)?
            }
        };
        let number = self.namespaces.len() as u16;
        self.namespaces.push(Known { id, shape, tenant, model: model.to_owned() });
        self.by_id.insert(id, number);
        Ok(number)
    }

    /// The number of a namespace that was entered.
    pub fn find(&self, id: &NamespaceId) -> Option<u16> {
        self.by_id.get(id).copied()
    }

    pub fn namespace(&self, number: u16) -> &Known {
        &self.namespaces[usize::from(number)]
    }

    /// All namespaces, by their numbers.
    pub fn namespaces(&self) -> &[Known] {
        &self.namespaces
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

    /// The number of a tenant with this name.
    pub fn named(&self, name: &str) -> Option<u16> {
        self.by_name.get(name).copied()
    }
}

fn full(what: &str) -> Error {
    Error::new(Code::MemoryCapReached, format!("the store knows {MOST} {what}, and takes no more"))
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
