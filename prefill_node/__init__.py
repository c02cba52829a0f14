"""The prefill node daemon: computes prompts and leases their KV."""
