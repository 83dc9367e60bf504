"""When the running maximum of a row rises, O and the row sum are multiplied by 2^(old - new). When is that worth it?

O is exact for any reference point that is used for all of a row's terms, so a rise of less than `threshold` (in powers
of two) can be ignored: terms grow to at most 2^threshold, which neither float32 sums nor bf16 / fp16 probabilities mind
(8 is 256). With random data the maximum rises little after the first blocks, and almost every rescale disappears; with
data whose maximum keeps rising every block rescales as before. Threshold 0 keeps only the exact part: nothing is
multiplied while no maximum of the warp's rows moves.

On Hopper O lives in the registers of the same threads, so a rescale is head_dim_v / 2 multiplications a thread and
block, between 10 and 25 % of the arithmetic of a softmax step; the branch is taken by whole warps.
Source: FlashAttention-4 (arXiv 2603.05451), conditional softmax rescaling.
"""


def keeps_reference(step_log2, threshold: float):
    """Whether a row may keep its old reference point.

    Args: step_log2: (old maximum - new maximum) * scale * log2 e, at most 0; -inf for a row that had seen no key.
        threshold: powers of two, at least 0.
    Contract: the result is the same in all threads of a row, since the maxima are.
    """
    return step_log2 >= -threshold
