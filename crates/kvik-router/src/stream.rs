//! A handover while prefill still computes: both engines get the request at once.
//!
//! What decode must know of the prefill engine besides the request, that engine says in its answers to whoever
//! asks, and the router keeps the last such text ([`Engine::template`]) without reading it. So the first request
//! to an engine is a pull that asks; every later one carries a seed, fresh for each request, and that text. The
//! engines find each other by the two, and move the KV as it is computed.
//!
//! Prefill's answer says what became of it. One with an offer (`do_remote_prefill`) has not handed over so, for
//! example because it has started again since: decode's request is taken back and sent again with the offer. Where
//! prefill refuses or fails, decode's request is taken back too; nothing of its answer has gone to the client.
//!
//! Decode may answer first: its last parts come before prefill's answer does, it has the KV itself, or it has computed
//! the prompt since the stream failed. Which of these it was, decode says in its answer, or prefill in its own, for
//! which the router then waits: [`crate::stream_end`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::body::{Kind, RequestBody};
use crate::exchange::Exchange;
use crate::handover::{self, Answer, Begun, ClientRequest, begin, decode, read_params, recompute};
use crate::metrics::{FailureKind, Recompute, Role, Stage, Streamed};
use crate::note::Note;
use crate::pool::Engine;
use crate::release::{self, GrantedKv};
use crate::reply::Reply;
use crate::shared::Shared;
use crate::stream_end::{Answering, GRACE, StreamEnd, patience};
use crate::upstream::{Attached, Call, Failure};

/// The longest template that is kept: one ticket a rank, of at most 256 bytes each.
const MOST_TEMPLATE: usize = 1 << 20;

/// The template in a prefill answer's params, if there is one.
pub(crate) fn template_of(params: &RawValue) -> Option<Arc<str>> {
    #[derive(Deserialize)]
    struct Params<'a> {
        #[serde(borrow)]
        kvik: Option<Kvik<'a>>,
    }
    #[derive(Deserialize)]
    struct Kvik<'a> {
        #[serde(borrow)]
        stream: Option<&'a RawValue>,
    }
    let template = serde_json::from_str::<Params<'_>>(params.get()).ok()?.kvik?.stream?.get();
    (template.len() <= MOST_TEMPLATE && template.starts_with('{')).then(|| template.into())
}

/// Whether params are an offer that decode is to pull.
fn is_offer(params: &RawValue) -> bool {
    #[derive(Deserialize)]
    struct Params {
        do_remote_prefill: Option<bool>,
    }
    serde_json::from_str::<Params>(params.get()).is_ok_and(|params| params.do_remote_prefill == Some(true))
}

/// What both engines are told of one stream: `{"seed": ..., "of": ...}`. None where the system has no random
/// bytes: a seed that others can guess would let them take this request's place.
fn told(template: &str) -> Option<String> {
    let mut seed = [0u8; 32];
    getrandom::fill(&mut seed).ok()?;
    let hex: String = seed.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(format!(r#"{{"seed":"{hex}","of":{template}}}"#))
}

/// How the two requests are to go on.
enum Next {
    /// Decode has begun to answer.
    Answer(Answer),
    /// Decode is to be asked again: with an offer, or to compute the prompt itself.
    Decode(Option<Box<RawValue>>),
    /// Nothing was sent to the prefill engine: as if there were no template.
    Pull,
}

/// What came of the prefill request.
enum Prefill {
    Answered(Option<Box<RawValue>>),
    Refused(Answer),
    Failed(Failure),
}

/// Serves a request by a stream from this engine; none where it is to be pulled instead.
pub(crate) async fn serve(
    exchange: &mut Exchange,
    request: &ClientRequest<'_>,
    headers: &HeaderMap,
    engine: &Arc<Engine>,
) -> Result<Option<Answer>, Reply> {
    let Some(template) = engine.template() else { return Ok(None) };
    let Some(told) = told(&template) else { return Ok(None) };
    match both(exchange, request, headers, (engine, template), &told).await? {
        Next::Answer(answer) => Ok(Some(answer)),
        Next::Pull => Ok(None),
        Next::Decode(params) => decode(exchange, request, headers, params.as_deref()).await.map(Some),
    }
}

async fn both(
    exchange: &mut Exchange,
    request: &ClientRequest<'_>,
    headers: &HeaderMap,
    (engine, template): (&Arc<Engine>, Arc<str>),
    told: &str,
) -> Result<Next, Reply> {
    let shared = exchange.shared.clone();
    let text = format!(r#"{{"do_remote_prefill":true,"do_remote_decode":false,"kvik":{{"stream":{told}}}}}"#);
    let Ok(params) = RawValue::from_string(text) else { return Ok(Next::Pull) };
    let to_prefill = request.call(headers, request.body.for_prefill(request.kind, Some(told)));
    let to_decode = request.call(headers, request.body.for_decode(Some(&params)));
    let attached = Arc::new(Attached::default());
    exchange.prefill = Some(engine.url.clone());
    exchange.stage = Stage::Prefill;
    exchange.timing.decode_begins();
    let began = Instant::now();
    let id = exchange.id.clone();
    let mut prefilling = Box::pin(prefill(shared.clone(), engine.clone(), to_prefill));
    let mut handed_over = false;
    let begun = {
        let decoding = begin(&shared, &id, &to_decode, &attached, &mut exchange.decode);
        tokio::pin!(decoding);
        tokio::select! {
            begun = &mut decoding => begun,
            prefilled = &mut prefilling => {
                if matches!(prefilled, Prefill::Answered(_)) {
                    exchange.timing.prefilled(began);
                }
                if let Some(next) = after_prefill(&shared, &id, prefilled)? {
                    return Ok(next);
                }
                handed_over = true;
                exchange.stage = Stage::Decode;
                exchange.granted = Some(GrantedKv {
                    call: to_decode.clone(),
                    kind: request.kind,
                    attached: attached.clone(),
                });
                decoding.await
            }
        }
    };
    let (answering, begun) = begun?;
    exchange.decode_answered(matches!(begun, Begun::Refused(_)));
    exchange.stage = Stage::Decode;
    if let Some(end) = end_of(exchange, engine, template, &begun, handed_over) {
        hear_out(exchange, request.kind, to_decode, (end, prefilling), began.elapsed());
    }
    Ok(Next::Answer(handover::answer(exchange, answering, begun)))
}

/// Decode has begun to answer: keeps what the beginning and prefill say of the stream, and has the rest of the answer
/// read for it. Gives the stream's end where nobody has said anything yet.
fn end_of(
    exchange: &mut Exchange,
    engine: &Arc<Engine>,
    template: Arc<str>,
    begun: &Begun,
    handed_over: bool,
) -> Option<Arc<StreamEnd>> {
    if matches!(begun, Begun::Refused(_)) {
        return None;
    }
    let end = StreamEnd::new(exchange.shared.clone(), exchange.id.clone(), engine.clone(), template);
    let end = Arc::new(end);
    if handed_over {
        end.prefill_says(true);
    }
    match begun {
        Begun::Whole(_, whole) => end.decode_says(&Note::of(whole).unwrap_or_default()),
        Begun::First(_, first, _) => {
            let mut answering = Answering::new(end.clone());
            answering.read(first);
            exchange.answering = Some(answering);
        }
        Begun::Refused(_) => {}
    }
    (!end.is_known()).then_some(end)
}

/// Waits for prefill's answer although decode is giving its own, which has not said yet how it came by the KV. An
/// offer is given back.
fn hear_out(
    exchange: &Exchange,
    kind: Kind,
    asked: Call,
    (end, prefilling): (Arc<StreamEnd>, impl Future<Output = Prefill> + Send + 'static),
    decode_took: Duration,
) {
    let (shared, id) = (exchange.shared.clone(), exchange.id.clone());
    let Ok(place) = shared.late.clone().try_acquire_owned() else { return end.forget() };
    let (tasks, handle) = (shared.tasks.clone(), shared.handle.clone());
    tasks.spawn_on(
        async move {
            tokio::pin!(prefilling);
            let mut answer = tokio::time::timeout(GRACE, &mut prefilling).await;
            if answer.is_err() {
                // Until prefill has answered, which says its template again.
                end.forget();
                answer = tokio::time::timeout(patience(decode_took), prefilling).await;
            }
            match answer {
                Ok(Prefill::Answered(Some(params))) => {
                    end.prefill_says(!is_offer(&params));
                    if is_offer(&params) {
                        give_back(&shared, &id, kind, asked, &params);
                    }
                }
                Ok(Prefill::Failed(failure)) => shared.report(&id, &failure),
                Ok(Prefill::Answered(None) | Prefill::Refused(_)) | Err(_) => {}
            }
            drop(place);
        },
        &handle,
    );
}

/// Gives back what prefill offers of a request that decode has answered without it. `asked`: what decode was.
fn give_back(shared: &Arc<Shared>, id: &str, kind: Kind, asked: Call, params: &RawValue) {
    let body = asked.body.clone();
    if let Ok(made) = RequestBody::again(&body) {
        let call = Call { body: made.for_decode(Some(params)).into(), ..asked };
        release::start(shared, GrantedKv { call, kind, attached: Arc::default() }, id);
    }
}

/// How to go on once prefill has answered; none: with the decode request that is under way.
fn after_prefill(shared: &Shared, id: &str, prefilled: Prefill) -> Result<Option<Next>, Reply> {
    match prefilled {
        Prefill::Answered(Some(params)) if !is_offer(&params) => Ok(None),
        Prefill::Answered(Some(params)) => {
            shared.metrics.streamed(Streamed::Offered);
            Ok(Some(Next::Decode(Some(params))))
        }
        Prefill::Answered(None) => {
            recompute(shared, id, Recompute::NoParams);
            Ok(Some(Next::Decode(None)))
        }
        Prefill::Refused(answer) => Ok(Some(Next::Answer(answer))),
        Prefill::Failed(failure) => {
            shared.report(id, &failure);
            match failure.kind {
                FailureKind::Connect => Ok(Some(Next::Pull)),
                // It has died in the middle. Decode has the prompt, and need not find out by itself.
                FailureKind::Closed => {
                    recompute(shared, id, Recompute::PrefillDied);
                    Ok(Some(Next::Decode(None)))
                }
                _ => Err(Reply::engine_failed(&failure)),
            }
        }
    }
}

/// Asks the prefill engine, and keeps the template of its answer.
async fn prefill(shared: Arc<Shared>, engine: Arc<Engine>, call: Call) -> Prefill {
    let stale = || shared.metrics.stale_connection(Role::Prefill);
    let response = match shared.upstream.send(&engine, &call, &Attached::default(), stale).await {
        Ok(response) if response.status().is_success() => response,
        Ok(response) => return Prefill::Refused(Answer::passed_on(response, engine.clone())),
        Err(failure) => return Prefill::Failed(failure),
    };
    match read_params(&shared, response).await {
        Ok(params) => {
            engine.keep_template(params.as_deref().and_then(template_of));
            Prefill::Answered(params)
        }
        Err((kind, detail)) => {
            engine.note(Err(kind));
            Prefill::Failed(Failure::new(&engine, kind, detail))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn a_template_is_kept_as_it_came() {
        let found = template_of(&raw(r#"{"a":1,"kvik":{"stream":{"b": 1.50,"c":[ ]},"version":5}}"#));
        assert_eq!(found.as_deref(), Some(r#"{"b": 1.50,"c":[ ]}"#));
        for none in ["{}", r#"{"kvik":null}"#, r#"{"kvik":{}}"#, r#"{"kvik":{"stream":null}}"#, "[1]", "7"] {
            assert!(template_of(&raw(none)).is_none(), "{none}");
        }
    }

    #[test]
    fn only_true_makes_an_offer() {
        assert!(is_offer(&raw(r#"{"do_remote_prefill":true}"#)));
        for none in ["{}", r#"{"do_remote_prefill":false}"#, r#"{"do_remote_prefill":"true"}"#, "[]"] {
            assert!(!is_offer(&raw(none)), "{none}");
        }
    }

    #[test]
    fn every_stream_has_a_seed_of_its_own() {
        let (one, other) = (told("{}").unwrap(), told("{}").unwrap());
        assert_ne!(one, other);
        let read: serde_json::Value = serde_json::from_str(&one).unwrap();
        assert_eq!(read["seed"].as_str().unwrap().len(), 64);
    }
}
