//! Asking the agent over HTTP.

use std::future::Future;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes as Chunk;
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;

use super::{CliError, cli_error};
use crate::http::WARNING;
use crate::http::api::Problem;

/// A little longer than the agent takes for any answer.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Longest answer that is read: thousands of volumes take a few MiB.
const BODY_LIMIT: usize = 256 << 20;

/// Which agent is asked.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AgentArgs {
    /// Agent to ask
    #[arg(long, env = "UNION_CSI_AGENT", value_name = "URL", default_value = "http://127.0.0.1:9830")]
    pub(super) agent: String,
}

impl AgentArgs {
    /// What the agent answers at `path` (with query).
    pub(super) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CliError> {
        let (status, warning, body) = block_on(self.fetch(path))??;
        if let Some(warning) = warning {
            super::output::warn(&warning);
        }
        let told = |e: serde_json::Error| CliError::Answer { url: self.agent.clone(), reason: e.to_string() };
        if status.is_success() {
            return serde_json::from_slice(&body).map_err(told);
        }
        match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => Err(CliError::Refused {
                status: status.as_u16(),
                error: problem.error,
                reasons: problem.reasons,
            }),
            Err(e) => Err(told(e)),
        }
    }

    async fn fetch(&self, path: &str) -> Result<(StatusCode, Option<String>, Chunk), CliError> {
        let uri: Uri = self.agent.trim_end_matches('/').parse().map_err(|_| self.bad_url())?;
        let (Some("http"), Some(host)) = (uri.scheme_str(), uri.host()) else { return Err(self.bad_url()) };
        let port = uri.port_u16().unwrap_or(80);
        let ask = async {
            // A literal IPv6 address stands in brackets in a URL and without them for connect.
            let bare = host.trim_start_matches('[').trim_end_matches(']');
            let stream = tokio::net::TcpStream::connect((bare, port)).await.map_err(|e| e.to_string())?;
            let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
                .await
                .map_err(|e| e.to_string())?;
            let request = Request::get(path)
                .header(hyper::header::HOST, format!("{host}:{port}"))
                .body(Empty::<Chunk>::new())
                .map_err(|e| e.to_string())?;
            let answer = async {
                let response = sender.send_request(request).await.map_err(|e| e.to_string())?;
                let status = response.status();
                let warning =
                    response.headers().get(WARNING).and_then(|w| w.to_str().ok()).map(str::to_owned);
                let body = Limited::new(response.into_body(), BODY_LIMIT).collect().await;
                let body = body.map_err(|e| e.to_string())?;
                Ok::<_, String>((status, warning, body.to_bytes()))
            };
            tokio::pin!(answer);
            // The connection is driven here, until the answer is there: no task outlives the question.
            tokio::select! {
                done = &mut answer => done,
                ended = connection => match ended {
                    Ok(()) => answer.await,
                    Err(e) => Err(e.to_string()),
                },
            }
        };
        let reason = match tokio::time::timeout(TIME_LIMIT, ask).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(reason)) => reason,
            Err(_) => format!("no answer within {} s", TIME_LIMIT.as_secs()),
        };
        cli_error::NoAgentSnafu { url: self.agent.clone(), reason }.fail()
    }

    fn bad_url(&self) -> CliError {
        CliError::Usage {
            problem: format!("{:?} is not the URL of an agent", self.agent),
            remedy: "write for example --agent http://127.0.0.1:9830".to_owned(),
        }
    }
}

/// Runs something to its end on this thread.
pub(super) fn block_on<F: Future>(future: F) -> Result<F::Output, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::Output { source })?;
    Ok(runtime.block_on(future))
}

/// A query of these pairs, percent-encoded (RFC 3986, section 2.3: what is not unreserved).
pub(super) fn query(pairs: &[(String, String)]) -> String {
    let encode = |text: &str| -> String {
        text.bytes()
            .map(|b| match b {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    char::from(b).to_string()
                }
                _ => format!("%{b:02X}"),
            })
            .collect()
    };
    let joined: Vec<String> = pairs.iter().map(|(k, v)| format!("{}={}", encode(k), encode(v))).collect();
    joined.join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_cannot_be_broken_out_of() {
        let pairs = [("size", "1Gi"), ("nodeSelector", "a=b,c&d=e f+ü")].map(|(k, v)| (k.into(), v.into()));
        assert_eq!(query(&pairs), "size=1Gi&nodeSelector=a%3Db%2Cc%26d%3De%20f%2B%C3%BC");
    }

    #[test]
    fn an_agent_that_does_not_answer_is_told_with_the_remedy() {
        let agent = AgentArgs { agent: "http://127.0.0.1:1".into() };
        let told = agent.get::<serde_json::Value>("/v1/status").unwrap_err().to_string();
        assert!(told.starts_with("no agent answers at http://127.0.0.1:1 ("), "{told}");
        assert!(told.contains("--agent"), "{told}");
        let wrong = AgentArgs { agent: "nas".into() };
        assert!(wrong.get::<serde_json::Value>("/").unwrap_err().to_string().contains("not the URL"));
    }
}
