/* The C interface of the native CPU library: plain structs and pointers, no torch, no C++ types.
 * kernels.py mirrors these structs with ctypes; hr_abi_version() is checked at load. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HR_ABI_VERSION 9

enum hr_dtype { HR_F32 = 0, HR_BF16 = 1, HR_F16 = 2, HR_I8 = 3 };

/* Storage of packed weights. Block kinds keep 4 to 8 bits a weight with one fp16 scale a group. */
enum hr_format {
  HR_W_F32 = 0,
  HR_W_BF16 = 1,
  HR_W_Q4_0 = 2,
  HR_W_Q4_1 = 3,
  HR_W_F16 = 4,
  HR_W_Q5_0 = 6,
  HR_W_Q5_1 = 7,
  HR_W_Q8_0 = 8,
  HR_W_Q2_K = 10,
  HR_W_Q3_K = 11,
  HR_W_Q4_K = 12,
  HR_W_Q5_K = 13,
  HR_W_Q6_K = 14,
};

enum hr_op {
  HR_OP_RMS_NORM = 0,
  HR_OP_LINEAR = 1,
  HR_OP_ROTARY = 2,
  HR_OP_GLU = 3,
  HR_OP_EMBEDDING = 4,
  HR_OP_KV_WRITE = 5,
  HR_OP_ATTENTION = 6,
  HR_OP_SAMPLE = 7,
  HR_OP_ROUTE = 8,
  HR_OP_EXPERTS = 9,
  HR_OP_LOGPROBS = 10,
};

/* y = norm(x + residual) * weight; residual (if any) becomes x + residual. Strides in elements. A row of x holds
 * `inner` vectors of `hidden` one after another (heads); without heads it is 1. */
struct hr_rms_norm {
  const void* x;
  void* residual; /* NULL: none */
  const float* weight;
  void* y;
  int64_t x_stride, residual_stride, y_stride;
  int32_t rows, inner, hidden, dtype;
  float eps;
};

/* y[rows, n] = x[rows, k] w[n, k]^T + bias. `packed` is what hr_pack made. `scratch`: hr_linear_scratch bytes. */
struct hr_linear {
  const void* x;
  const void* packed;
  const float* bias; /* NULL: none */
  void* y;
  void* scratch;
  int64_t x_stride, y_stride;
  int32_t rows, k, n, format, x_dtype, y_dtype;
  float softcap; /* of y; 0 = none */
  int32_t prompt; /* of a step that reads prompts: what it computes must not depend on how they are cut */
};

/* In place on q [rows, q_heads, head_dim] and k [rows, k_heads, head_dim]; cos_sin [L, rotary_dim] float32.
 * With norm weights, each head is RMS-normalised before it is rotated. */
struct hr_rotary {
  void *q, *k;
  const int64_t* positions;
  const float* cos_sin;
  const float *q_norm, *k_norm; /* NULL: none */
  int64_t q_stride, k_stride;
  int32_t rows, q_heads, k_heads, head_dim, rotary_dim, is_neox, dtype;
  float eps;
};

/* y[rows, n] = act(x[:, :n]) * x[:, n:]; act 0 silu, 1 gelu (tanh), 2 gelu (erf) */
struct hr_glu {
  const void* x;
  void* y;
  int64_t x_stride, y_stride;
  int32_t rows, n, act, dtype;
};

/* y[rows, hidden] = scale * table[ids]; ids outside [0, vocab) give zeros. */
struct hr_embedding {
  const int32_t* ids;
  const void* packed;
  void* y;
  int64_t y_stride;
  int32_t rows, hidden, vocab, format, dtype;
  float scale;
};

/* The KV cache of one layer, in any dtype beside activations of any. Where both are bfloat16, and for int8 beside
 * bfloat16, pairs lie side by side, so that one vector instruction takes two: K [P, H, D/2, S, 2], V [P, H, S/2, D, 2].
 * All others: K [P, H, D, S], V [P, H, S, D]. int8: each run of S x D numbers is followed by S float32 scales, one for
 * each token; a row with a number that is not finite gets the scale NaN. block_stride in elements. */
struct hr_kv_write {
  const void *k, *v;
  void *k_cache, *v_cache;
  const int64_t* slots;
  int64_t k_stride, v_stride, block_stride;
  int32_t rows, kv_heads, head_dim, block_size, dtype, kv_dtype;
};

struct hr_attention {
  const void* q;
  const void *k_cache, *v_cache;
  void* out;
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const float* sinks; /* [q_heads] or NULL */
  void* scratch;      /* hr_attention_scratch bytes */
  int64_t q_stride, out_stride, block_stride, table_stride;
  int32_t num_decode, num_reqs, q_heads, kv_heads, head_dim, block_size, dtype, kv_dtype, window, splits;
  int32_t prefill_tasks; /* pairs (request, first query) in prefill_list */
  const int32_t* prefill_list;
  float scale, softcap;
};

/* ids[rows]: one token of each row of logits x[rows, n]; the contract "sample" says which. int64; `guarded`: int32, and
 * -1 where a logit is not finite. */
struct hr_sample {
  const float *x, *temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *uniform;
  void* ids;
  int64_t x_stride;
  int32_t rows, n, guarded;
};

/* Of each row of logits x[rows, n]: the log-probability and the rank of ids[row], and the k largest; the contract
 * "logprobs". k <= n. */
struct hr_logprobs {
  const float* x;
  const int64_t* ids;
  float* own;
  int64_t* rank;
  float* top;       /* [rows, k] */
  int64_t* top_ids; /* [rows, k] */
  int64_t x_stride;
  int32_t rows, n, k;
};

/* Of each row of logits x[rows, experts] the top_k experts, best first, and their weights; the contract "topk_softmax". */
struct hr_route {
  const float* logits;
  float* weights; /* [rows, top_k] */
  int32_t* ids;   /* [rows, top_k] */
  int64_t logits_stride;
  int32_t rows, experts, top_k, renormalize;
};

/* y[t] = sum over k of weights[t, k] * down(act(gate(x[t])) * up(x[t])) of expert ids[t, k]. w13 and w2: a packed matrix
 * of each expert, [2 * intermediate, hidden] in `format` and [hidden, intermediate] in `down_format`. */
struct hr_experts {
  const void* x;
  const float* weights; /* [rows, top_k] */
  const int32_t* ids;   /* [rows, top_k], within [0, experts) */
  const void* const* w13;
  const void* const* w2;
  void* y;
  void* scratch; /* hr_experts_scratch bytes, 64-byte aligned */
  int64_t x_stride, y_stride;
  int32_t rows, top_k, experts, hidden, intermediate, format, down_format, act, dtype;
};

typedef struct hr_pool hr_pool;
typedef struct hr_tape hr_tape;

#pragma GCC visibility push(default)
int32_t hr_abi_version(void);
const char* hr_isa(void);
hr_pool* hr_pool_new(int32_t threads);
void hr_pool_free(hr_pool*);
int32_t hr_pool_threads(hr_pool*);
void hr_pool_active(hr_pool*, int32_t n);

int32_t hr_run(hr_pool*, int32_t op, const void* args);

hr_tape* hr_tape_new(void);
void hr_tape_free(hr_tape*);
int32_t hr_tape_add(hr_tape*, hr_pool*, int32_t op, const void* args);
int32_t hr_tape_run(hr_pool*, hr_tape*);
int32_t hr_tape_profile(hr_pool*, hr_tape*, int32_t* ops, int64_t* nanoseconds, int32_t capacity);

int64_t hr_packed_bytes(int32_t format, int64_t n, int64_t k);
int32_t hr_pack(hr_pool*, int32_t format, const void* source, int64_t source_row_bytes, void* packed, int64_t n,
                int64_t k, int64_t first_row);
/* Reads `bytes` at `data` once with all threads: nanoseconds. */
int64_t hr_read(hr_pool*, const void* data, int64_t bytes);
/* A 64-bit sum of the bytes at `data`, read with all threads: tells damaged data from whole. */
uint64_t hr_checksum(hr_pool*, const void* data, int64_t bytes);
int64_t hr_linear_scratch(int32_t format, int32_t rows, int32_t k);
int64_t hr_attention_scratch(const struct hr_attention*);
int64_t hr_experts_scratch(const struct hr_experts*);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
