//! What blocks share: room, and the policy that says which of them makes room for another one.

use crate::figures::Cause;
use crate::policy::{Policy, PolicyKind};

/// Blocks that make room for each other.
pub(crate) struct Share {
    pub policy: Box<dyn Policy>,
    kind: PolicyKind,
    /// The tenant that has it alone; none: all that have no quota.
    pub tenant: Option<String>,
    /// Bytes of its blocks.
    pub used: u64,
    pub quota: Option<u64>,
    /// Bytes of blocks that are to stay for a while.
    pub kept: u64,
}

impl Share {
    /// That of all tenants without a quota.
    pub fn common(kind: PolicyKind, capacity: u64) -> Share {
        Share { policy: kind.build(capacity), kind, tenant: None, used: 0, quota: None, kept: 0 }
    }

    /// That of one tenant.
    pub fn of(kind: PolicyKind, tenant: &str, quota: u64) -> Share {
        let tenant = Some(tenant.to_owned());
        Share { tenant, quota: Some(quota), ..Share::common(kind, quota) }
    }

    /// Why a block of so many bytes, which `fits` an empty memory or does not, has no room even alone: nobody is to go for
    /// one that has none.
    pub fn too_large(&self, bytes: u64, fits: bool) -> Option<Cause> {
        match self.quota {
            Some(quota) if bytes > quota => Some(Cause::Quota),
            _ => (!fits).then_some(Cause::InUse),
        }
    }

    /// The name of the policy that says what goes next.
    pub fn deciding(&self) -> &'static str {
        self.policy.chosen().unwrap_or(self.kind.name())
    }
}

/// Why nothing can go. Long prompts alone fill a memory with blocks that others come after; where readers and pins
/// have a quarter of it, the larger of the two is to be told.
pub(crate) fn why_full(shares: &[Share], lent: u64) -> Cause {
    let sum = |of: fn(&Share) -> u64| shares.iter().map(of).sum::<u64>();
    let (kept, used) = (sum(|share| share.kept), sum(|share| share.used));
    match kept + lent < used / 4 {
        true => Cause::InUse,
        false if lent > kept => Cause::HeldByReaders,
        false => Cause::Pinned,
    }
}

/// Whose blocks go, in this order, for one of this share. Shares without a quota have what is left, so theirs go first,
/// and no others for theirs. One whose slabs have room for all of its quota takes from itself (`full`): they are of other shapes.
pub(crate) fn makes_room(shares: &[Share], of: usize, full: bool) -> [Option<usize>; 2] {
    // There is less than the quotas promise: who has most of its own makes room.
    let left = |at: &usize| shares[*at].quota.unwrap_or(0).saturating_sub(shares[*at].used);
    let most = (1..shares.len()).filter(|at| shares[*at].used > 0).min_by_key(left);
    if full { [Some(of), None] } else { [Some(0), most.filter(|_| of != 0)] }
}
