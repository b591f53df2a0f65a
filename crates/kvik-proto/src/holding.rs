//! Who keeps the pages of a grant that is over from their owner: for errors that say whom to wait for.

use crate::flow::Role;
use crate::node::Node;
use crate::{FlowKey, OWN_SESSION};
use kvik_core::{GrantId, RegionId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A grant whose pages are not the owner's again yet.
#[derive(Debug, Clone)]
pub struct Holding {
    /// Which.
    pub grant: GrantId,
    /// Its pages, or parts of pages.
    pub pages: Arc<[u32]>,
    /// In how many parts its pages are seen.
    pub parts: u32,
    /// Who still takes part in it, in words: peers, or this engine itself.
    pub by: BTreeSet<String>,
}

impl<R: Clone> Node<R> {
    /// What keeps a grant from ending; `None` when it has ended or was never given.
    pub fn holding(&self, id: GrantId) -> Option<Holding> {
        let (view, flows) = self.grants.held(id)?;
        let by = flows.iter().map(|key| self.holder(*key)).collect();
        Some(Holding { grant: id, pages: view.pages().clone(), parts: view.parts(), by })
    }

    /// The same of every grant over a region that is ending.
    pub fn holdings_of(&self, region: RegionId) -> Vec<Holding> {
        self.grants.of_region(region).into_iter().filter_map(|id| self.holding(id)).collect()
    }

    /// The same of every grant that is ending.
    pub fn holdings(&self) -> Vec<Holding> {
        self.grants.all().into_iter().filter_map(|id| self.holding(id)).collect()
    }

    /// Transfers and requests that have not ended on this side.
    pub fn open_flows(&self) -> usize {
        self.flows.len()
    }

    fn holder(&self, key: FlowKey) -> String {
        if key.0 == OWN_SESSION {
            return "this engine itself".to_owned();
        }
        match (self.established(key.0), self.flows.get(&key).map(|flow| &flow.role)) {
            (None, Some(Role::Owner { reader, .. })) => format!("engine {reader}, which is gone"),
            _ => self.peer_text(key.0),
        }
    }
}
