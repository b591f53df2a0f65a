//! What the router counts. Every label is an enum, so the number of series is bounded by this file.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Declares an enum that is a label's value: its name in snake case.
macro_rules! label_values {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// The name in metrics, logs and messages.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

label_values! {
    /// What a client asked for.
    Endpoint {
        Completions = "completions",
        ChatCompletions = "chat_completions",
        Models = "models",
    }
}

label_values! {
    /// How a client's request ended.
    Outcome {
        /// Answered completely with the engine's success.
        Ok = "ok",
        /// Refused by the router or by an engine with a 4xx.
        Refused = "refused",
        /// Turned away because of `max_inflight` or `max_body_memory`.
        Overloaded = "overloaded",
        /// An engine failed before the answer began; the client got a 502 or 504.
        EngineFailed = "engine_failed",
        /// An engine failed within its answer; the client's connection was cut so that it shows.
        Cut = "cut",
        /// The client was gone before its answer was complete.
        ClientLeft = "client_left",
    }
}

label_values! {
    /// The part an engine plays.
    Role { Prefill = "prefill", Decode = "decode", }
}

label_values! {
    /// How an engine failed.
    FailureKind {
        /// No connection: nothing was sent.
        Connect = "connect",
        /// Silent for longer than the role's timeout.
        Timeout = "timeout",
        /// The connection ended before the answer did.
        Closed = "closed",
        /// A 5xx answer.
        Status = "status",
        /// An answer that is not what this endpoint answers.
        Protocol = "protocol",
    }
}

label_values! {
    /// Why decode computed a prompt although the router serves handovers.
    Recompute {
        /// Prefill answered without `kv_transfer_params`.
        NoParams = "no_params",
        /// Prefill's connection ended while it was streaming its KV to decode.
        PrefillDied = "prefill_died",
        /// A stream's KV did not come to decode.
        StreamFailed = "stream_failed",
        BatchedPrompt = "batched_prompt",
        ManyChoices = "many_choices",
        PromptLogits = "prompt_logits",
        PromptEmbeds = "prompt_embeds",
    }
}

label_values! {
    /// What became of requests that both engines were sent at once.
    Streamed {
        /// Decode has loaded their KV so, by its own word or else by prefill's.
        Loaded = "streamed",
        /// Decode had all of their KV itself.
        NotNeeded = "not_needed",
        /// Decode computed them itself, since their KV did not come.
        Recomputed = "recomputed",
        /// Decode answered them, and neither engine has said how it came by their KV.
        Unconfirmed = "unconfirmed",
        /// Prefill has not streamed, and offered its KV at its end: decode was asked again, and pulled.
        Offered = "offered",
    }
}

label_values! {
    /// Where a request stood when its client left.
    Stage {
        /// Its body had not arrived completely.
        Body = "body",
        /// A prefill engine was computing.
        Prefill = "prefill",
        /// Prefill had answered and no decode engine had the request yet.
        Gap = "gap",
        /// A decode engine had the request and had not answered.
        Decode = "decode",
        /// The answer was in flight.
        Stream = "stream",
    }
}

label_values! {
    /// Stretches of time within a request; `timing` defines each.
    Phase {
        Route = "route",
        Prefill = "prefill",
        FirstToken = "first_token",
        Decode = "decode",
        KvWait = "kv_wait",
        Total = "total",
    }
}

label_values! {
    /// What came of an attempt to give back KV that no decode engine takes.
    ReleaseOutcome {
        /// A decode engine took the KV over, which frees it on the prefill engine.
        Released = "released",
        /// The decode engine refused or failed; the KV ends with its grant's expiry.
        Failed = "failed",
        /// So many releases were running that this one was left to the grant's expiry.
        Skipped = "skipped",
    }
}

/// Series by the values of `N` labels.
type By<const N: usize, M> = Family<[(&'static str, &'static str); N], M>;

/// All counters of one router.
pub(crate) struct Metrics {
    registry: Registry,
    requests: By<2, Counter>,
    phases: By<1, Histogram>,
    pub(crate) inflight: Gauge,
    recomputed: By<1, Counter>,
    streamed: By<1, Counter>,
    pub(crate) streams_open: Gauge,
    client_left: By<1, Counter>,
    releases: By<1, Counter>,
    stale: By<1, Counter>,
    upstream_errors: By<2, Counter>,
}

/// From a tenth of a millisecond, which is routing, to ten minutes, which is a long answer.
const BUCKETS: [f64; 21] = [
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0, 600.0,
];

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            requests: Family::default(),
            phases: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            inflight: Gauge::default(),
            recomputed: Family::default(),
            streamed: Family::default(),
            streams_open: Gauge::default(),
            client_left: Family::default(),
            releases: Family::default(),
            stale: Family::default(),
            upstream_errors: Family::default(),
            registry: Registry::with_prefix("kvik_router"),
        };
        let registry = &mut metrics.registry;
        registry.register("requests", "Requests by endpoint and by how they ended", metrics.requests.clone());
        let text = "Time in each phase of a request";
        registry.register_with_unit("phase", text, Unit::Seconds, metrics.phases.clone());
        registry.register("inflight", "Requests in progress", metrics.inflight.clone());
        let text = "Prompts that decode computed itself, by reason";
        registry.register("recomputed", text, metrics.recomputed.clone());
        let text = "Requests that both engines were sent at once, by what became of them";
        registry.register("streams", text, metrics.streamed.clone());
        let text = "Of those, the ones that decode answers and that are not counted yet";
        registry.register("streams_open", text, metrics.streams_open.clone());
        let text = "Clients that left before their answer was complete, by stage";
        registry.register("client_left", text, metrics.client_left.clone());
        let text = "Attempts to give back KV that no decode engine takes, by outcome";
        registry.register("releases", text, metrics.releases.clone());
        let text = "Requests sent again because an idle connection had been closed, by role";
        registry.register("stale_connections", text, metrics.stale.clone());
        let text = "Engine failures by role and kind";
        registry.register("upstream_errors", text, metrics.upstream_errors.clone());
        metrics
    }

    pub(crate) fn request(&self, endpoint: Endpoint, outcome: Outcome) {
        self.requests.get_or_create(&[("endpoint", endpoint.name()), ("outcome", outcome.name())]).inc();
    }

    pub(crate) fn phase(&self, phase: Phase, seconds: f64) {
        self.phases.get_or_create(&[("phase", phase.name())]).observe(seconds);
    }

    pub(crate) fn recomputed(&self, reason: Recompute) {
        self.recomputed.get_or_create(&[("reason", reason.name())]).inc();
    }

    pub(crate) fn streamed(&self, outcome: Streamed) {
        self.streamed.get_or_create(&[("outcome", outcome.name())]).inc();
    }

    pub(crate) fn client_left(&self, stage: Stage) {
        self.client_left.get_or_create(&[("stage", stage.name())]).inc();
    }

    pub(crate) fn release(&self, outcome: ReleaseOutcome) {
        self.releases.get_or_create(&[("outcome", outcome.name())]).inc();
    }

    pub(crate) fn stale_connection(&self, role: Role) {
        self.stale.get_or_create(&[("role", role.name())]).inc();
    }

    pub(crate) fn upstream_error(&self, role: Role, kind: FailureKind) {
        self.upstream_errors.get_or_create(&[("role", role.name()), ("kind", kind.name())]).inc();
    }

    /// The OpenMetrics text of everything above.
    pub(crate) fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
