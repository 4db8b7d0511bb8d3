"""Losses fused with the linear layer whose output they take: the logits are computed by chunks, and never kept.

Each takes the layer's input (…, H), its weight (C, H) and bias (C,) in place of the logits input · weightᵀ + bias, (…, C), with the classes
last; `fuse_linear` takes the bias by name alone. What holds one entry a row has the leading dimensions of input. Options that every one
has, beside those of its loss:

- `loss_weight`: the loss's own `weight`, whose name the layer's has here.
- `gradient`: "forward" writes the gradients of input, weight and bias in the forward pass: three matrix products. It is the default for
    scalar results, but for float16, and under torch.compile where z-loss, log-sum-exp or entropy is a result too: a graph gives each a
    gradient. "backward" keeps a few numbers a row and computes the logits again: four
    products, and any gradient may arrive, also for the loss of each row. Of losses of rows and divergences it takes about half of the
    memory, where there are more classes than rows: it goes by classes, and needs no sum of the weight's gradient.
- `chunk`: rows at a time. By default as many as 1 GiB of logits has, fewer where a GPU has less than 4 GiB to spare, on a CPU 256 MiB; of
    exponentials (below) as many as a 32nd of the GPU's memory has, if that is more.
    A weight's gradient of half precision that is summed in float32 is written at the end; until then its memory holds the logits of a
    chunk, where they fit, and there may be as many rows as fit. One chunk of all rows needs no such sum, and is taken where it has the
    room of that. By classes, as many are taken as fill the memory of `chunk` rows, by default 0.5 GiB.
- `accumulate`: the dtype in which a weight's gradient of half precision is summed over the chunks: "float32" (by default where it takes
    no more than half of the GPU's free memory) or "weight", its own, which takes a third of the memory, and rounds after every chunk: in
    bfloat16 the error of the gradient was up to 1.4 times that of one product at 4 chunks, and 1.6 times at 16.
- `logits`: how logits are kept, where input and weight are of half precision. By default none is rounded, by whatever way takes the least
    time: a product of our own (below), or chunks of logits in float32 beside their gradient in half precision, which is rounded once.
    "float32" always takes these chunks, "weight" may round logits to the dtype of the weight, where that takes less time or memory. Rounded
    logits of standard deviation 32 put an error of 3 % on the gradients, where others have 0.3 %.
- `skip_ignored`: leave ignored rows out of the products. The host waits for the device, to learn how many rows are left.
- `valid`: the same without waiting: how many rows are not ignored, or a number that they do not exceed. Where more are, the result is nan.
    Further results of a row that is left out are 0.
- `shift`: a row's class index is that so many rows later in its sequence (…, T); the last rows are ignored. 1 predicts the next token,
    without a sliced copy of input.

`linear_objective` computes any scalar of the rows' log-probabilities and entropies, in three products too. Under torch.compile it keeps
the exponentials of all rows from forward to backward.

"batchmean" divides by the number of all rows, as if input were (N, H).

Products are torch's own, of the dtype of input and weight, or of autocast's; the logits, the loss, its sums and those of the bias are
computed in float32. On GPUs from sm_90 on, losses of rows in half precision whose gradient is not written in forward take a product of our
own: it keeps no logits, and a row's results have the same bits in any batch. Large scalar losses in bfloat16 take it in forward too: it
keeps exponentials of the logits. docs/know/template_linear.md says which calls those are.

Where input, weight and bias do not require grad, nothing is kept. Derivatives of second order, in forward mode, under torch.func
and of what else requires grad (a teacher, class weights) come from the unfused computation.
"""
