//! An agent of a cluster whose API server is away.

use super::*;

/// A kubeconfig for an API server that nobody runs.
fn kubeconfig(scratch: &Scratch) -> String {
    let path = scratch.join("kubeconfig");
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n\
                contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n";
    fs::write(&path, text).expect("a kubeconfig");
    path.display().to_string()
}

/// The body that the agent's HTTP answers, whatever the code, and the headers before it.
fn ask(agent: &Agent, path: &str) -> String {
    let out = std::process::Command::new("curl")
        .args(["-sSi", "-m", "10", &format!("{}{path}", agent.url)])
        .output()
        .expect("curl");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_that_were_mounted_are_served_on_and_told_of_when_the_api_server_is_away_at_the_start() {
    let mut machine = Machine::new(&[300]);
    let mut csi = machine.agent.csi().await;
    csi.create(&Wanted::new("media", 32 * MIB, &[("splitQuantum", "16Mi")])).await.expect("a volume");
    let target = mount(&mut csi, "media", PLAIN).await;
    fs::write(target.join("file"), "before").expect("a file");
    let Machine { agent, scratch, .. } = &mut machine;
    agent.kill();

    // The same machine, now a node of a cluster.
    let yaml = fs::read_to_string(scratch.join("agent.yaml")).expect("agent.yaml");
    fs::create_dir_all(scratch.join("kubelet/plugins_registry")).expect("a kubelet's directory");
    let cluster = format!(
        "{yaml}kubernetes: {{ kubeconfig: {}, kubeletDir: {} }}\n",
        kubeconfig(scratch),
        scratch.join("kubelet").display()
    );
    fs::write(scratch.join("agent.yaml"), cluster).expect("agent.yaml");
    agent.restart_until("/healthz");

    let ready = ask(agent, "/readyz");
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    let told =
        ready.contains("the Kubernetes API cannot be used since") || ready.contains("has not answered yet");
    assert!(told && ready.contains("not in the store yet"), "{ready}");
    let status = ask(agent, "/v1/status");
    assert!(status.starts_with("HTTP/1.1 200") && status.contains("\"mountedHere\":1"), "{status}");
    assert!(status.contains("the store cannot be read"), "{status}");
    let volumes = ask(agent, "/v1/volumes");
    assert!(volumes.contains("union-csi-warning: only what this node knows"), "{volumes}");
    assert_eq!(fs::read_to_string(target.join("file")).expect("the file"), "before");
    fs::write(target.join("file"), "after").expect("written");

    let refused = agent.csi().await.create(&Wanted::new("other", 32 << 20, &[])).await.expect_err("no store");
    assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused}");
    assert!(agent.stop().is_some_and(|status| status.success()), "it ends when it is told to");
    assert_eq!(fs::read_to_string(target.join("file")).expect("the file"), "after");
}
