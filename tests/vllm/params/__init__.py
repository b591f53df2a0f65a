"""Attacks on a decode server by whoever sends `kv_transfer_params`, against real vLLM servers.

Valid parameters are taken from one or two prefill servers, changed, and sent through decode's own port. Each
answer is compared with one engine's own, and each prompt is asked again plainly, which shows whether decode's
prefix cache was poisoned. Prompts are fresh for each mutation.

    python -m tests.vllm.params --count 500
"""
