//! The routes: one table, from which the router and the OpenAPI document are made.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use jiff::Timestamp;
use schemars::{Schema, SchemaGenerator};
use serde::Serialize;

use super::api::{NodeView, OrphansAnswer, PlanAnswer, Problem, Readiness, Status, VolumeView};
use super::guard::{Guard, check};
use super::view::View;
use super::{assemble, openapi, plan};
use crate::domain::pool::PoolView;
use crate::node::volume::VolumeSnapshot;
use crate::store::Selector;
use crate::store::object::{Branch, StorageNode, VolumeSplit};
use crate::store::view::network;
use crate::telemetry;

type Shared = State<Arc<View>>;

/// What a route answers with.
pub(super) enum Answer {
    /// JSON of this schema.
    Json(fn(&mut SchemaGenerator) -> Schema),
    /// Text of this media type.
    Text(&'static str),
}

/// A route.
pub(super) struct Route {
    pub(super) path: &'static str,
    pub(super) summary: &'static str,
    pub(super) answer: Answer,
    handler: fn() -> MethodRouter<Arc<View>>,
}

/// Every route.
pub(super) const ROUTES: &[Route] = &[
    Route {
        path: "/",
        summary: "The page: the disks of the nodes and where each volume's branches lie.",
        answer: Answer::Text("text/html"),
        handler: || get(page),
    },
    Route {
        path: "/healthz",
        summary: "Whether the process answers.",
        answer: Answer::Text("text/plain"),
        handler: || get(async || "ok\n"),
    },
    Route {
        path: "/readyz",
        summary: "Whether this node can serve volumes now: 200, or 503 with every reason.",
        answer: Answer::Json(|g| g.subschema_for::<Readiness>()),
        handler: || get(readyz),
    },
    Route {
        path: "/metrics",
        summary: "Metrics in the text format of Prometheus and OpenMetrics; see docs/METRICS.md.",
        answer: Answer::Text("application/openmetrics-text"),
        handler: || get(metrics),
    },
    Route {
        path: "/v1/status",
        summary: "This node in short.",
        answer: Answer::Json(|g| g.subschema_for::<Status>()),
        handler: || get(status),
    },
    Route {
        path: "/v1/nodes",
        summary: "All nodes with their pools.",
        answer: Answer::Json(|g| g.subschema_for::<Vec<NodeView>>()),
        handler: || get(nodes),
    },
    Route {
        path: "/v1/pools",
        summary: "The pools of all nodes: what the planner sees, and what `union-csi plan --pools` reads.",
        answer: Answer::Json(|g| g.subschema_for::<Vec<PoolView>>()),
        handler: || get(pools),
    },
    Route {
        path: "/v1/volumes",
        summary: "All volumes with their branches.",
        answer: Answer::Json(|g| g.subschema_for::<Vec<VolumeView>>()),
        handler: || get(volumes),
    },
    Route {
        path: "/v1/volumes/{id}",
        summary: "One volume: its pods, mounts, process, branches and disks.",
        answer: Answer::Json(|g| g.subschema_for::<VolumeView>()),
        handler: || get(volume),
    },
    Route {
        path: "/v1/plan",
        summary: "The split of a volume that would be made now, or every reason why there is none; nothing is made. \
                  StorageClass parameters are given as they are written in a class. Answers 200 either way, 400 for a \
                  question that is none.",
        answer: Answer::Json(|g| g.subschema_for::<PlanAnswer>()),
        handler: || get(plan_route),
    },
    Route {
        path: "/v1/orphans",
        summary: "What no claim needs any more, each with the command that removes it, as the leader last found it (once an \
                  hour). Only the leader answers: others say with 503 who that is. 404 without a cluster.",
        answer: Answer::Json(|g| g.subschema_for::<OrphansAnswer>()),
        handler: || get(orphans),
    },
    Route {
        path: "/openapi.json",
        summary: "This description of the API.",
        answer: Answer::Text("application/json"),
        handler: || get(async || Json(openapi::document())),
    },
];

/// All routes behind the guard.
pub fn router(view: Arc<View>) -> Router {
    let guard = Guard::new(view.hosts.clone());
    ROUTES
        .iter()
        .fold(Router::new(), |router, route| router.route(route.path, (route.handler)()))
        .fallback(async || {
            let told = "there is nothing here; /openapi.json describes what there is".to_owned();
            problem(StatusCode::NOT_FOUND, told, Vec::new())
        })
        .layer(from_fn_with_state(guard, check))
        .with_state(view)
}

/// An answer of 400 and above.
pub(super) fn problem(status: StatusCode, error: String, reasons: Vec<String>) -> Response {
    (status, Json(Problem { error, reasons })).into_response()
}

/// What the store told, empty where it told nothing, with the reason in `problems`.
struct Stored {
    splits: Vec<VolumeSplit>,
    branches: Vec<Branch>,
    nodes: Vec<StorageNode>,
    problems: Vec<String>,
}

/// Header of an answer that lacks what the store could not tell, with the reasons. The values of the API are lists, which
/// have no place for it.
pub(crate) const WARNING: &str = "union-csi-warning";

impl Stored {
    /// `body`, marked where it is only what this node knows.
    fn answer(&self, body: impl Serialize) -> Response {
        let mut response = Json(body).into_response();
        if !self.problems.is_empty() {
            let told = format!("only what this node knows: {}", self.problems.join("; "));
            // A header holds no control characters; what is not ASCII is read as Latin-1 at worst.
            let plain: String =
                told.chars().map(|c| if c.is_ascii() && !c.is_ascii_control() { c } else { '?' }).collect();
            if let Ok(value) = HeaderValue::from_str(&plain) {
                response.headers_mut().insert(WARNING, value);
            }
        }
        response
    }
}

/// Bounds the wait for a store that is away, so that what this node knows by itself is still answered in time.
const STORE_LIMIT: std::time::Duration = std::time::Duration::from_secs(3);

async fn stored(view: &View) -> Stored {
    let read = async {
        let all = Selector::All;
        let (splits, branches, nodes) = futures::future::join3(
            view.store.splits().list(&all),
            view.store.branches().list(&all),
            view.store.nodes().list(&all),
        )
        .await;
        let mut problems = Vec::new();
        let mut note = |e: crate::store::StoreError| problems.push(format!("the store cannot be read: {e}"));
        let splits = splits.map_err(&mut note).unwrap_or_default();
        let branches = branches.map_err(&mut note).unwrap_or_default();
        let nodes = nodes.map_err(&mut note).unwrap_or_default();
        Stored { splits, branches, nodes, problems }
    };
    tokio::time::timeout(STORE_LIMIT, read).await.unwrap_or_else(|_| Stored {
        splits: Vec::new(),
        branches: Vec::new(),
        nodes: Vec::new(),
        problems: vec![format!("the store did not answer within {} s", STORE_LIMIT.as_secs())],
    })
}

fn node_views(view: &View, stored: &Stored) -> Vec<NodeView> {
    let mergerfs = view.machine.abilities().mergerfs_version;
    let (pools, carried) = (view.machine.pools(), view.machine.carried());
    assemble::nodes(&stored.nodes, &view.node, &view.node_labels, pools, mergerfs, carried)
}

async fn volume_views(view: &View) -> (Vec<VolumeView>, Stored) {
    let (stored, local) = futures::future::join(stored(view), view.machine.volumes()).await;
    let volumes =
        assemble::volumes(&stored.splits, &stored.branches, &stored.nodes, &local, Timestamp::now());
    (volumes, stored)
}

async fn readyz(State(view): Shared) -> Response {
    let (status, body) = match view.machine.ready().await {
        Ok(()) => (StatusCode::OK, Readiness { ready: true, reasons: Vec::new() }),
        Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, Readiness { ready: false, reasons }),
    };
    (status, Json(body)).into_response()
}

async fn status(State(view): Shared) -> Json<Status> {
    let ((volumes, stored), ready) = futures::future::join(volume_views(&view), view.machine.ready()).await;
    let nodes = node_views(&view, &stored);
    let own: Vec<NodeView> = nodes.into_iter().filter(|n| n.local).collect();
    let mut problems = ready.as_ref().err().cloned().unwrap_or_default();
    problems.extend(stored.problems);
    let carried = view.machine.carried();
    Json(Status {
        node: view.node.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ready: ready.is_ok(),
        problems,
        abilities: view.machine.abilities(),
        pools: assemble::pools(&own),
        volumes: assemble::counts(&volumes),
        conditions: own.into_iter().flat_map(|n| n.conditions).collect(),
        transports: carried.transports,
        network: carried.network,
        standing: view.machine.standing(),
    })
}

async fn nodes(State(view): Shared) -> Response {
    let stored = stored(&view).await;
    stored.answer(node_views(&view, &stored))
}

async fn pools(State(view): Shared) -> Response {
    let stored = stored(&view).await;
    stored.answer(assemble::pools(&node_views(&view, &stored)))
}

async fn volumes(State(view): Shared) -> Response {
    let (volumes, stored) = volume_views(&view).await;
    stored.answer(volumes)
}

async fn volume(State(view): Shared, Path(id): Path<String>) -> Response {
    let (volumes, stored) = volume_views(&view).await;
    match volumes.into_iter().find(|v| v.id.as_str() == id || (!id.is_empty() && v.request_name == id)) {
        Some(volume) => stored.answer(volume),
        None if stored.problems.is_empty() => {
            let told = format!("there is no volume {id:?}; /v1/volumes lists them");
            problem(StatusCode::NOT_FOUND, told, Vec::new())
        }
        None => {
            let told = format!("volume {id:?} is not mounted here, and the store cannot be asked");
            problem(StatusCode::SERVICE_UNAVAILABLE, told, stored.problems)
        }
    }
}

async fn plan_route(State(view): Shared, Query(query): Query<Vec<(String, String)>>) -> Response {
    let stored = stored(&view).await;
    let pools = assemble::pools(&node_views(&view, &stored));
    match plan::answer(&query, &pools, Some(&network(&stored.nodes))) {
        Ok(answer) => stored.answer(answer),
        Err(reasons) => {
            let told = "the query does not describe a volume".to_owned();
            problem(StatusCode::BAD_REQUEST, told, reasons)
        }
    }
}

async fn orphans(State(view): Shared) -> Response {
    let standing = view.machine.standing();
    let known = view.machine.orphans();
    if let (true, Some(scan)) = (standing.leads, &known.last) {
        return Json(OrphansAnswer {
            scanned: scan.at,
            next: known.next,
            problem: known.problem,
            counts: scan.counts.clone(),
            orphans: scan.orphans.clone(),
        })
        .into_response();
    }
    let ask = "`union-csi orphans` looks for them now, from anywhere with a kubeconfig";
    let (status, told) = match (&standing.leader, standing.leads) {
        _ if standing.store != "kubernetes" => (
            StatusCode::NOT_FOUND,
            "there are no claims without a cluster; /v1/nodes names branches on the disks that no volume has"
                .to_owned(),
        ),
        (_, true) => {
            let when = known.next.map_or_else(|| "soon".to_owned(), |at| format!("at {at}"));
            (
                StatusCode::SERVICE_UNAVAILABLE,
                format!("this instance leads and has not looked for orphans yet: it does {when}; {ask}"),
            )
        }
        (Some(leader), false) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "only the leader knows of orphans, and that is the instance on {leader}: ask its agent; {ask}"
            ),
        ),
        (None, false) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("only the leader knows of orphans, and this instance knows of none; {ask}"),
        ),
    };
    problem(status, told, known.problem.into_iter().collect())
}

async fn metrics(State(view): Shared) -> Response {
    let volumes: Vec<VolumeSnapshot> = view.machine.volumes().await;
    let memory = volumes
        .iter()
        .filter_map(|v| v.pid)
        .filter_map(|pid| view.machine.process_memory(pid).map(|bytes| (pid, bytes)))
        .collect();
    let scrape = telemetry::Scrape {
        node: view.node.clone(),
        ready: view.machine.ready().await.is_ok(),
        pools: view.machine.pools(),
        volumes,
        memory,
        abilities: view.machine.abilities(),
        transports: view.machine.carried().transports,
        counters: view.machine.counters(),
        agent: telemetry::AgentUsage::now(),
    };
    let content_type = [(header::CONTENT_TYPE, telemetry::CONTENT_TYPE)];
    (content_type, telemetry::encode(&scrape)).into_response()
}

/// The page, with a nonce made for this one answer, so that nothing else can run in it.
async fn page() -> Response {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let body = include_str!("page.html").replace("{{nonce}}", &nonce);
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let mut response = ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], body).into_response();
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}
