"""Settings of a node on the machines whose GPUs run these tests."""

GPU = [
    'device="cuda"',
    'rollout.engine.attention_backend="triton"',
    'rollout.engine.mm_attention_backend="triton_attn"',
    'rollout.engine.sampling_backend="pytorch"',
    'rollout.dtype="bfloat16"',
    'trainer.compute_dtype="bfloat16"',
]
