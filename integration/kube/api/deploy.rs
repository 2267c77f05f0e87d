//! What is under `deploy/`, given to a real API server: it is taken, it protects the volumes' records, and its rights are
//! those of the program, neither fewer nor more.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SelfSubjectRulesReview,
    SelfSubjectRulesReviewSpec,
};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client, Config};
use serde_json::json;
use tokio::sync::OnceCell;
use union_csi::controllers::permissions::{PERMISSIONS, Permission, Scope};

use crate::support::{client, namespace};

const OWN: &str = "union";

fn kubectl(args: &[&str]) -> Output {
    Command::new("kubectl")
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("kubectl, which integration/kube/run puts into PATH")
}

/// Standard output; panics where the server refuses.
fn done(args: &[&str]) -> String {
    let out = kubectl(args);
    assert!(out.status.success(), "kubectl {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// What the server says where it refuses; `None` where it does not.
fn refused(args: &[&str]) -> Option<String> {
    let out = kubectl(args);
    (!out.status.success()).then(|| String::from_utf8_lossy(&out.stderr).into_owned())
}

/// `kubectl apply -k deploy/`, once for all tests here: the namespace and the rights are the cluster's.
async fn installed() {
    static ONCE: OnceCell<()> = OnceCell::const_new();
    ONCE.get_or_init(|| async {
        // The definitions come first in the stream, and are served a moment later; nothing in it needs them.
        done(&["apply", "--server-side", "--force-conflicts", "--validate=strict", "-k", "deploy/"]);
    })
    .await;
}

/// A token of the program's account.
async fn token() -> String {
    installed().await;
    let accounts: Api<ServiceAccount> = Api::namespaced(client().await, OWN);
    let wanted = TokenRequest {
        spec: TokenRequestSpec { expiration_seconds: Some(3600), ..TokenRequestSpec::default() },
        ..TokenRequest::default()
    };
    accounts
        .create_token_request("union-csi", &PostParams::default(), &wanted)
        .await
        .expect("a token of the account")
        .status
        .expect("a status")
        .token
}

/// A client that is the program: with its account's token and nothing else.
async fn program() -> Client {
    let token = token().await;
    let mut config = Config::infer().await.expect("the server in KUBECONFIG");
    config.auth_info = kube::config::AuthInfo { token: Some(token.into()), ..Default::default() };
    Client::try_from(config).expect("a client")
}

#[tokio::test]
async fn everything_that_is_installed_is_taken_by_the_server_as_it_is_written() {
    installed().await;
    // A second time changes nothing, which it would where the server had dropped a field.
    let again = done(&[
        "apply",
        "--server-side",
        "--force-conflicts",
        "-k",
        "deploy/",
        "--dry-run=server",
        "-o",
        "name",
    ]);
    for kind in [
        "namespace/union",
        "customresourcedefinition.apiextensions.k8s.io/volumesplits.union.io",
        "csidriver.storage.k8s.io/union.csi.union.io",
        "daemonset.apps/union-csi",
        "storageclass.storage.k8s.io/union",
    ] {
        assert!(again.lines().any(|line| line == kind), "{kind} is installed: {again}");
    }
    let driver = done(&["get", "csidriver", "union.csi.union.io", "-o", "json"]);
    let driver: serde_json::Value = serde_json::from_str(&driver).expect("json");
    for (field, wanted) in [
        ("attachRequired", true),
        ("podInfoOnMount", true),
        ("storageCapacity", true),
        ("requiresRepublish", false),
    ] {
        assert_eq!(driver["spec"][field], wanted, "{field}");
    }
    assert_eq!(driver["spec"]["fsGroupPolicy"], "File");
    assert!(driver["spec"]["tokenRequests"].is_null(), "no pod's token is asked for");
}

#[tokio::test]
async fn every_example_is_taken_by_the_server_as_it_is_written() {
    installed().await;
    let admin = client().await;
    let namespace = namespace(&admin).await;
    // Pods are not taken without; where a controller manager runs it may be there already.
    let accounts: Api<ServiceAccount> = Api::namespaced(admin, &namespace);
    let account = ServiceAccount {
        metadata: kube::api::ObjectMeta { name: Some("default".to_owned()), ..Default::default() },
        ..ServiceAccount::default()
    };
    match accounts.create(&PostParams::default(), &account).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        made => drop(made.expect("an account")),
    }
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/examples");
    for entry in std::fs::read_dir(examples).expect("the examples") {
        let path = entry.expect("an entry").path();
        let path = path.to_str().expect("a path");
        done(&["apply", "--dry-run=server", "--validate=strict", "-n", &namespace, "-f", path]);
    }
}

#[tokio::test]
async fn the_records_of_all_volumes_are_not_deleted_in_passing() {
    installed().await;
    let namespace = ["delete", "namespace", OWN, "--dry-run=server"];
    let definition = ["delete", "crd", "volumesplits.union.io", "--dry-run=server"];
    // The server takes a policy up some moments after it is written.
    let mut said = None;
    for _ in 0..120 {
        said = refused(&namespace);
        if said.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let said = said.expect("the namespace is not deleted");
    assert!(said.contains("union.io/delete-all-volumes=yes"), "it says how it would be meant: {said}");
    let said = refused(&definition).expect("the definition is not deleted");
    assert!(said.contains("volumesplits.union.io deletes every Union CSI volume"), "{said}");

    let meant = |subject: &[&str], change: &str| {
        done(&[&["annotate", "--overwrite"], subject, &[change]].concat());
    };
    meant(&["namespace", OWN], "union.io/delete-all-volumes=yes");
    assert_eq!(refused(&namespace), None, "it is meant now");
    meant(&["namespace", OWN], "union.io/delete-all-volumes-");
    let other = crate::support::namespace(&client().await).await;
    assert_eq!(
        refused(&["delete", "namespace", &other, "--dry-run=server"]),
        None,
        "others' are not guarded"
    );
}

#[tokio::test]
async fn a_volume_is_not_deleted_by_its_record_unless_that_is_meant() {
    installed().await;
    let split = json!({
        "apiVersion": "union.io/v1alpha1", "kind": "VolumeSplit",
        "metadata": {"name": "kept", "namespace": OWN},
        "spec": {"volume": "kept", "requestName": "kept", "capacity": 1 << 30, "accessModes": ["SingleNodeWriter"]}
    });
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), split.to_string()).expect("written");
    done(&["apply", "-f", file.path().to_str().expect("a path")]);
    let delete = ["delete", "volumesplit", "kept", "-n", OWN, "--dry-run=server"];
    let mut said = None;
    for _ in 0..120 {
        said = refused(&delete);
        if said.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let said = said.expect("it is not deleted");
    assert!(
        said.contains("delete its claim instead") && said.contains("union.io/delete-volume=yes"),
        "{said}"
    );
    let program = format!("system:serviceaccount:{OWN}:union-csi");
    let by_the_program = [&delete[..], &["--as", &program]].concat();
    assert_eq!(refused(&by_the_program), None, "the program deletes volumes");
    done(&["annotate", "volumesplit", "kept", "-n", OWN, "union.io/delete-volume=yes"]);
    assert_eq!(refused(&delete), None, "it is meant now");
    done(&["delete", "volumesplit", "kept", "-n", OWN]);
}

async fn may(
    program: &Client,
    namespace: Option<&str>,
    group: &str,
    resource: &str,
    verb: &str,
    name: Option<&str>,
) -> bool {
    let (resource, subresource) =
        resource.split_once('/').map_or((resource, None), |(r, s)| (r, Some(s.to_owned())));
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                namespace: namespace.map(str::to_owned),
                group: Some(group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource,
                verb: Some(verb.to_owned()),
                name: name.map(str::to_owned),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(program.clone());
    let answer = reviews.create(&PostParams::default(), &review).await.expect("an answer");
    answer.status.is_some_and(|status| status.allowed)
}

#[tokio::test]
async fn the_program_may_do_what_its_table_says_and_nothing_else() {
    let program = program().await;
    for Permission { scope, group, resources, names, verbs, .. } in PERMISSIONS {
        let namespace = (*scope == Scope::Own).then_some(OWN);
        for (resource, verb) in resources.iter().flat_map(|r| verbs.iter().map(move |v| (r, v))) {
            let name = names.first().copied();
            assert!(may(&program, namespace, group, resource, verb, name).await, "{verb} {group} {resource}");
            if *scope == Scope::Own {
                let elsewhere = may(&program, Some("default"), group, resource, verb, name).await;
                assert!(!elsewhere, "{verb} {group} {resource} outside of {OWN}");
            }
        }
    }
    // What the server itself computes of all roles, without what every account may ask about itself.
    let reviews: Api<SelfSubjectRulesReview> = Api::all(program.clone());
    let review = SelfSubjectRulesReview {
        spec: SelfSubjectRulesReviewSpec { namespace: Some(OWN.to_owned()) },
        ..SelfSubjectRulesReview::default()
    };
    let rules =
        reviews.create(&PostParams::default(), &review).await.expect("rules").status.expect("a status");
    for rule in rules.resource_rules {
        let groups = rule.api_groups.unwrap_or_default();
        if groups.iter().any(|g| g == "authorization.k8s.io" || g == "authentication.k8s.io") {
            continue;
        }
        for (resource, verb) in rule
            .resources
            .unwrap_or_default()
            .iter()
            .flat_map(|r| rule.verbs.iter().map(move |v| (r.clone(), v)))
        {
            let in_table = PERMISSIONS.iter().any(|p| {
                groups.iter().any(|g| g == p.group)
                    && p.resources.contains(&resource.as_str())
                    && p.verbs.contains(&verb.as_str())
                    && p.names == rule.resource_names.clone().unwrap_or_default()
            });
            assert!(in_table, "{verb} on {resource} of {groups:?} is granted and not in the table");
        }
    }
    for (group, resource, verb) in [
        ("", "secrets", "list"),
        ("", "secrets", "watch"),
        ("", "secrets", "patch"),
        ("", "pods", "list"),
        ("", "pods", "create"),
        ("", "pods/exec", "create"),
        ("", "nodes", "patch"),
        ("", "serviceaccounts/token", "create"),
        ("", "configmaps", "get"),
        ("apps", "daemonsets", "patch"),
        ("rbac.authorization.k8s.io", "clusterroles", "bind"),
        ("coordination.k8s.io", "leases", "delete"),
    ] {
        assert!(!may(&program, Some(OWN), group, resource, verb, None).await, "{verb} {resource}");
    }
    assert!(!may(&program, Some(OWN), "coordination.k8s.io", "leases", "update", Some("another")).await);
}

/// A process that is ended with the test.
struct Agent(std::process::Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until `find` gives something, half a minute at most.
async fn within<T>(what: &str, log: &Path, mut find: impl FnMut() -> Option<T>) -> T {
    for _ in 0..120 {
        if let Some(found) = find() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    panic!("no {what} within 30 s; the agent's log:\n{}", std::fs::read_to_string(log).unwrap_or_default());
}

#[tokio::test]
#[ignore = "works on all claims of its server, so it has one of its own: scripts/test kube"]
async fn the_program_leads_and_answers_a_claim_with_the_rights_that_it_is_given() {
    let token = token().await;
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let kubeconfig = std::env::var("KUBECONFIG").expect("KUBECONFIG");
    let mut file: serde_json::Value =
        serde_saphyr::from_str(&std::fs::read_to_string(kubeconfig).expect("the kubeconfig")).expect("YAML");
    for user in file["users"].as_array_mut().expect("users") {
        user["user"] = serde_json::json!({ "token": token });
    }
    std::fs::write(at("kubeconfig"), file.to_string()).expect("written");
    let config = serde_json::json!({
        "mode": "controller",
        "nodeName": "deploy-test",
        "stateDir": at("state"),
        "csi": { "endpoint": format!("unix://{}", at("csi.sock").display()) },
        "http": { "listen": "off" },
        "kubernetes": { "kubeconfig": at("kubeconfig"), "namespace": OWN, "kubeletDir": at("kubelet") },
    });
    std::fs::write(at("agent.yaml"), config.to_string()).expect("written");
    let log = at("log");
    let child = Command::new(env!("CARGO_BIN_EXE_union-csi"))
        .args(["agent", "--config"])
        .arg(at("agent.yaml"))
        .stderr(std::fs::File::create(&log).expect("a log"))
        .spawn()
        .expect("the agent starts");
    let _agent = Agent(child);
    within("leader", &log, || {
        let lease =
            kubectl(&["-n", OWN, "get", "lease", "union-csi", "-o", "jsonpath={.spec.holderIdentity}"]);
        String::from_utf8_lossy(&lease.stdout).contains("deploy-test").then_some(())
    })
    .await;

    // No node has a pool, so the claim is answered by an event that says so.
    let namespace = namespace(&client().await).await;
    done(&["apply", "-f", "deploy/examples/storageclasses.yaml"]);
    let claim = serde_json::json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "claim" },
        "spec": {
            "storageClassName": "union-immediate", "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Gi" } }
        }
    });
    std::fs::write(at("claim.yaml"), claim.to_string()).expect("written");
    done(&["apply", "-n", &namespace, "-f", at("claim.yaml").to_str().expect("a path")]);
    // What the controller manager does where there is one: it names the provisioner.
    let named = "volume.kubernetes.io/storage-provisioner=union.csi.union.io";
    done(&["annotate", "--overwrite", "-n", &namespace, "pvc", "claim", named]);
    within("event", &log, || {
        let events =
            kubectl(&["-n", &namespace, "get", "events", "-o", "jsonpath={.items[*].involvedObject.name}"]);
        String::from_utf8_lossy(&events.stdout).contains("claim").then_some(())
    })
    .await;
    let log = std::fs::read_to_string(&log).expect("the log");
    assert!(!log.to_lowercase().contains("forbidden"), "the agent lacks a right:\n{log}");
}
