//! What each engine is sent, and what the client is sent back.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;

const KEEP: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

#[tokio::test]
async fn prefill_is_cut_to_one_token_and_decode_gets_the_original_with_the_params() {
    let odd = "{\"big\":123456789012345678901234567890.5e-3,\"deep\":[[{\"a\":[null,{}]}]],\"\u{fc}\":\"\\u00e9\\ud83d\\ude00\",\"sp\": [ 1 , 2 ]}";
    let prefill = one_answer(json(200, &format!("{{\"id\":\"x\",\n \"kv_transfer_params\" : {odd}}}"))).await;
    let decode = good_decode().await;
    let router = router(&prefill, &decode);
    let sent = r#"{"model":"m","prompt":"h\u00e9 \ud83d\ude00","max_tokens":64,"seed":18446744073709551616,"temperature":1.0,"later":{"z":1,"a":2},"stream":false}"#;
    let (status, headers, text) = complete(&router, sent).await;
    assert_eq!((status.as_u16(), text.as_str()), (200, r#"{"choices":[{"text":"ok"}]}"#));
    let got = prefill.next().await;
    assert_eq!(got.path, "/v1/completions");
    let kept = sent.replace(r#""max_tokens":64"#, r#""max_tokens":1"#);
    assert_eq!(got.text(), format!("{},{KEEP}}}", kept.strip_suffix('}').unwrap()));
    let other = decode.next().await;
    assert_eq!(other.text(), format!(r#"{},"kv_transfer_params":{odd}}}"#, sent.strip_suffix('}').unwrap()));
    let id = headers["x-request-id"].to_str().unwrap();
    assert_eq!((id.len(), got.id(), other.id()), (32, id, id));
}

#[tokio::test]
async fn a_clients_own_id_and_headers_reach_both_engines() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let router = router(&prefill, &decode);
    let mut client = Client::connect(router.addr()).await;
    let headers = [("x-request-id", "mine-7"), ("authorization", "Bearer k"), ("accept-encoding", "gzip")];
    let body = r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true},"min_tokens":4}"#;
    let answer = within("an answer", client.post("/v1/chat/completions?v=1", body, &headers)).await.unwrap();
    assert_eq!(answer.headers()["x-request-id"], "mine-7");
    let (p, d) = (prefill.next().await, decode.next().await);
    for got in [&p, &d] {
        assert_eq!((got.id(), got.path.as_str()), ("mine-7", "/v1/chat/completions?v=1"));
        assert_eq!(got.headers["authorization"], "Bearer k");
        assert_eq!(got.headers["content-type"], "application/json");
        assert!(!got.headers.contains_key("accept-encoding"));
    }
    let want = r#"{"messages":[{"role":"user","content":"x"}],"stream":false,"min_tokens":1,"max_tokens":1,KEEP,"max_completion_tokens":1}"#;
    assert_eq!(p.text(), want.replace("KEEP", KEEP));
    let without_brace = body.strip_suffix('}').unwrap();
    assert_eq!(d.text(), format!(r#"{without_brace},"kv_transfer_params":{PARAMS}}}"#));
}

#[tokio::test]
async fn without_params_decode_computes_the_prompt() {
    let sent = r#"{"prompt":"short","n":1}"#;
    for answer in [r#"{"choices":[]}"#, r#"{"choices":[],"kv_transfer_params":null}"#] {
        let prefill = one_answer(json(200, answer)).await;
        let decode = good_decode().await;
        let router = router(&prefill, &decode);
        assert_eq!(complete(&router, sent).await.0, 200);
        assert_eq!(decode.next().await.text(), sent);
        until_metric(&router, r#"kvik_router_recomputed_total{reason="no_params"} 1"#).await;
    }
}

#[tokio::test]
async fn what_params_cannot_stand_for_goes_to_decode_whole() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let router = router(&prefill, &decode);
    for (sent, reason) in [
        (r#"{"prompt":["a","b"]}"#, "batched_prompt"),
        (r#"{"prompt":"a","n":2}"#, "many_choices"),
        (r#"{"prompt":"a","echo":true,"logprobs":1}"#, "prompt_logits"),
        (r#"{"prompt_embeds":"AA=="}"#, "prompt_embeds"),
    ] {
        assert_eq!(complete(&router, sent).await.0, 200, "{sent}");
        assert_eq!(decode.next().await.text(), sent);
        until_metric(&router, &format!(r#"kvik_router_recomputed_total{{reason="{reason}"}} 1"#)).await;
    }
    assert_eq!(complete(&router, r#"{"prompt":[[1,2],[3]]}"#).await.0, 200);
    until_metric(&router, r#"kvik_router_recomputed_total{reason="batched_prompt"} 2"#).await;
    assert_eq!(prefill.pending().await, 0);
}

#[tokio::test]
async fn an_engines_4xx_is_the_clients() {
    let refusal = r#"{"error":{"message":"too long","code":400}}"#;
    let prefill = one_answer(json(400, refusal)).await;
    let decode = good_decode().await;
    let router = router(&prefill, &decode);
    let (status, headers, text) = complete(&router, r#"{"prompt":"x"}"#).await;
    assert_eq!((status.as_u16(), text.as_str()), (400, refusal));
    assert!(headers["server-timing"].to_str().unwrap().starts_with("route;dur="));
    assert_eq!(decode.pending().await, 0);
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="refused"} 1"#).await;

    let prefill = good_prefill().await;
    let decode = one_answer(json(422, refusal)).await;
    let router = common::router(&prefill, &decode);
    let (status, _, text) = complete(&router, r#"{"prompt":"x"}"#).await;
    assert_eq!((status.as_u16(), text.as_str()), (422, refusal));
}

#[tokio::test]
async fn what_decode_refuses_is_given_back() {
    let refusal = r#"{"error":{"message":"max_tokens is too large","code":400}}"#;
    let (prefill, asked) = (good_prefill().await, AtomicUsize::new(0));
    let decode = Fake::start(move || {
        let first = asked.fetch_add(1, Ordering::Relaxed) == 0;
        async move { if first { json(422, refusal) } else { json(200, "data: 1\n\n") } }
    })
    .await;
    let router = router(&prefill, &decode);
    // What prefill is not told, and so does not refuse.
    let sent = r#"{"prompt":"x","max_tokens":900000,"min_tokens":900001,"stream_options":{}}"#;
    let (status, _, text) = complete(&router, sent).await;
    assert_eq!((status.as_u16(), text.as_str()), (422, refusal));
    let refused = decode.next().await;
    let release = decode.next().await;
    assert_eq!(release.id(), format!("{}-release", refused.id()));
    let want = format!(r#"{{"prompt":"x","max_tokens":1,"kv_transfer_params":{PARAMS},"stream":true}}"#);
    assert_eq!(release.text(), want);
    until_metric(&router, r#"kvik_router_releases_total{outcome="released"} 1"#).await;
    // What decode takes is its own.
    assert_eq!(complete(&router, r#"{"prompt":"x"}"#).await.0, 200);
    decode.next().await;
    drained(router).await;
    assert_eq!(decode.pending().await, 0);
}

#[tokio::test]
async fn a_url_with_a_path_is_put_before_the_paths() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let (p, d) = (format!("{}/p/", prefill.url()), format!("{}/d", decode.url()));
    let router = kvik_router::RunningRouter::start(config(&[&p], &[&d])).unwrap();
    assert_eq!(complete(&router, r#"{"prompt":"x"}"#).await.0, 200);
    assert_eq!(prefill.next().await.path, "/p/v1/completions");
    assert_eq!(decode.next().await.path, "/d/v1/completions");
}
