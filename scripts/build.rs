//! Compiles the protocols of `src/csi` with protox, so that no protoc is needed on the building machine.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    for protocol in ["src/csi/csi.proto", "src/csi/registration/registration.proto"] {
        println!("cargo::rerun-if-changed={protocol}");
        let descriptors = protox::compile([protocol], ["src/csi"])?;
        // Default stubs answer UNIMPLEMENTED for the calls that are not served.
        tonic_prost_build::configure()
            .build_client(true)
            .build_server(true)
            .generate_default_stubs(true)
            .compile_fds(descriptors)?;
    }
    Ok(())
}
