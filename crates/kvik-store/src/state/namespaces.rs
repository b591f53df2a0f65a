//! Which namespaces make room for others.

use super::State;
use crate::NamespaceId;
use std::collections::HashSet;

impl State {
    /// Those that are best forgotten, some at once: see [`crate::tenants::Tenants::unused`].
    pub fn unused(&self) -> Vec<NamespaceId> {
        let kept: HashSet<u16> = self.kept.iter().map(|(_, id)| self.index.node(*id).namespace).collect();
        self.tenants.unused(|namespace| self.index.taken_for(namespace) == 0, &kept)
    }

    /// Forgets those of them that have no blocks, and that nobody works with.
    pub fn forget_namespaces(&mut self, ids: &[NamespaceId]) {
        let index = &self.index;
        self.tenants.forget(ids, |namespace| index.taken_for(namespace) == 0);
    }
}
