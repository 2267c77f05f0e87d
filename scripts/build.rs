//! Compiles `src/csi/csi.proto` with protox, so that no protoc is needed on the building machine.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=src/csi/csi.proto");
    let descriptors = protox::compile(["src/csi/csi.proto"], ["src/csi"])?;
    // Default stubs answer UNIMPLEMENTED for the calls that are not served.
    tonic_prost_build::configure()
        .build_client(true)
        .build_server(true)
        .generate_default_stubs(true)
        .compile_fds(descriptors)?;
    Ok(())
}
