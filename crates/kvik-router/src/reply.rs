//! The router's own error answers, in the shape that OpenAI clients read.

use axum::body::Body;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use serde_json::json;

use crate::headers::put_id;
use crate::metrics::{FailureKind, Outcome};
use crate::upstream::Failure;

/// An error answer, and how the request is counted that gets it.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) outcome: Outcome,
    pub(crate) code: &'static str,
    pub(crate) message: String,
}

impl Reply {
    /// The request is at fault.
    pub(crate) fn refused(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, outcome: Outcome::Refused, code, message: message.into() }
    }

    /// The client stopped sending; the answer is a formality.
    pub(crate) fn client_left() -> Self {
        let message = "the request body ended before it was complete".into();
        Self {
            status: StatusCode::BAD_REQUEST,
            outcome: Outcome::ClientLeft,
            code: "incomplete_body",
            message,
        }
    }

    /// There are as many requests in progress as are allowed.
    pub(crate) fn overloaded(limit: usize) -> Self {
        let message = format!("{limit} requests are in progress, which is this router's limit; try again");
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self { status, outcome: Outcome::Overloaded, code: "overloaded", message }
    }

    /// The bodies of the requests in progress take all the memory that they may.
    pub(crate) fn no_memory(limit: usize) -> Self {
        let message = format!(
            "the bodies of the requests in progress need all of the {limit} bytes of memory that this router has for \
             them (max_body_memory); try again"
        );
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self { status, outcome: Outcome::Overloaded, code: "body_memory_full", message }
    }

    /// An engine failed before anything of its answer had been passed on.
    pub(crate) fn engine_failed(failure: &Failure) -> Self {
        let (status, code) = match failure.kind {
            FailureKind::Timeout => (StatusCode::GATEWAY_TIMEOUT, "engine_timeout"),
            FailureKind::Connect => (StatusCode::BAD_GATEWAY, "engine_unreachable"),
            FailureKind::Closed => (StatusCode::BAD_GATEWAY, "engine_closed_connection"),
            FailureKind::Status => (StatusCode::BAD_GATEWAY, "engine_error"),
            FailureKind::Protocol => (StatusCode::BAD_GATEWAY, "engine_answer_invalid"),
        };
        let message = format!("{} engine {} failed: {}", failure.role.name(), failure.url, failure.detail);
        Self { status, outcome: Outcome::EngineFailed, code, message }
    }

    /// A role without engines, which a checked configuration does not have.
    pub(crate) fn no_engine() -> Self {
        let message = "there is no engine of the role that the request needs".into();
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self { status, outcome: Outcome::EngineFailed, code: "no_engine", message }
    }

    pub(crate) fn into_response(self, id: &str) -> Response<Body> {
        let kind = match self.outcome {
            Outcome::Refused | Outcome::ClientLeft => "invalid_request_error",
            Outcome::Overloaded => "overloaded_error",
            _ => "engine_error",
        };
        let error = json!({"message": self.message, "type": kind, "param": null, "code": self.code});
        let mut response = json_response(self.status, &json!({ "error": error }));
        put_id(response.headers_mut(), id);
        if self.outcome == Outcome::Overloaded {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A JSON answer of the router's own.
pub(crate) fn json_response(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
