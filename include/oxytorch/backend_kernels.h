/* Native kernels of a device, all optional: the part of the device contract behind `oxy_backend.kernels`.
 *
 * A host reads a member of oxy_kernels only if it lies within `size` and is not NULL, so members are appended without a
 * new version; the members of one group are all present or all NULL. A device without them is served by torch's own
 * operators. C11, like oxytorch/backend.h, which includes this file; its clauses on errors and threads hold here too.
 *
 * THE STEP TAIL: gradient norm, verdict, unscale, clip, update, average, copy-out, zero and statistics of all
 * parameters of an optimizer. Arithmetic, formats and order of summation are those of oxytorch/kernels/step_tail.h and
 * codec.h: a device that keeps to them gives the same bits as the processor.
 *
 *  K1  Every call enqueues on `queue` (NULL: is done when it returns) and reads no device value on the host. After
 *      tail_create and the first round of calls nothing is allocated, so that a round can be captured in a graph; what
 *      a replay shall see anew (scale, learning rate, counts) lies in device memory.
 *  K2  All pointers are device memory of the tail's device unless a field says "host". What tail_configure is given on
 *      the host is copied before it returns.
 *  K3  One round: tail_configure if something changed, tail_measure, tail_judge, tail_apply, on one queue. One tail is
 *      used by one thread at a time.
 *  K4  A round whose verdict is to skip changes no byte of parameters, master weights, low bits, copies, state,
 * averages and counts; gradients are zeroed if asked for.
 */
#ifndef OXYTORCH_BACKEND_KERNELS_H_
#define OXYTORCH_BACKEND_KERNELS_H_

#include <stdint.h>

#include "oxytorch/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The chunk tables of a set of parameters on one device; opaque, owned by whoever made it. */
typedef struct oxy_tail_s* oxy_tail;

/* oxytorch::kernels::ElementType and Rule, by number. */
typedef uint8_t oxy_element;
enum { OXY_F32 = 0, OXY_BF16 = 1, OXY_F16 = 2, OXY_INT8 = 3, OXY_F64 = 4 /* of a learning rate alone */ };
typedef uint8_t oxy_tail_rule;
enum {
  OXY_RULE_ADAMW = 0,
  OXY_RULE_ADAM = 1,
  OXY_RULE_SGD = 2,
  OXY_RULE_LION = 3,
  OXY_RULE_ADAGRAD = 4,
  OXY_RULE_RMSPROP = 5
};

/* One parameter; the fields of oxytorch::kernels::TailTensor. */
typedef struct oxy_tail_tensor {
  void* param;
  void* grad; /* NULL: takes no part in the round */
  float* master;
  int8_t* low_bits;
  void* copy;
  void* state[3];
  uint16_t* scale[3]; /* of Int8 state */
  float* ema;
  float* step;
  int64_t numel;
  int64_t rows;
  uint32_t group;  /* index into the groups */
  uint32_t stream; /* identity for random bits, and the parameter's place in `sums` and the norms of oxy_tail_results */
  oxy_element type;
  oxy_element grad_type;
  oxy_element state_type;
  oxy_element copy_type;
  uint8_t first; /* Sgd: the momentum buffer is not yet filled. The tail keeps this on the device from then on; read
                    when a tensor is configured for the first time or its state[0] changes. */
  uint8_t reserved[3];
} oxy_tail_tensor;

/* Hyperparameters of one group; the fields of oxytorch::kernels::TailGroup. */
typedef struct oxy_tail_group {
  double lr;
  const void* lr_tensor; /* NULL, or one element of `lr_type` that replaces lr */
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double momentum;
  double dampening;
  double lr_decay;
  oxy_tail_rule rule;
  oxy_element lr_type; /* OXY_F32 or OXY_F64 */
  uint8_t nesterov;
  uint8_t maximize;
  uint32_t reserved;
} oxy_tail_group;

/* Bits of oxy_tail_settings.flags. */
enum {
  OXY_TAIL_ZERO_GRAD = 1,  /* write zeros over the gradients */
  OXY_TAIL_COLLECT = 2,    /* fill param_norms and update_norms */
  OXY_TAIL_STOCHASTIC = 4, /* round parameters and state narrower than fp32 stochastically */
  OXY_TAIL_PROPAGATE = 8   /* apply a round with inf or NaN all the same, unless a scale or found_inf is given */
};

typedef struct oxy_tail_settings {
  uint32_t size; /* set by the caller: clause C4 of oxytorch/backend.h */
  uint32_t flags;
  double grad_divisor; /* gradients are divided by this and by grad_scale */
  double clip_norm;    /* 0: none; otherwise the coefficient is min(1, clip_norm / (norm + 1e-6)) */
  double clip_value;
  double agc;
  double agc_eps;
  double ema_decay;
  uint64_t seed;
  /* One fp32 element each, or NULL. */
  const float* grad_scale;
  float* found_inf;        /* not 0: skip; 1 is written where the round itself finds inf or NaN */
  const float* skip;       /* not 0: skip, without a word in found_inf */
  const float* norm_limit; /* a norm of the unscaled gradients above it: skip likewise */
} oxy_tail_settings;

/* What tail_judge found, in device memory of the caller. */
typedef struct oxy_tail_verdict {
  double multiplier; /* of each gradient: clip coefficient / (grad_scale * grad_divisor) */
  double inverse;    /* 1 / (grad_scale * grad_divisor) */
  double norm;       /* of all unscaled gradients, before clipping */
  double skip;       /* 1: change nothing; else 0 */
} oxy_tail_verdict;

/* Where a round writes what it learnt; each may be NULL. Arrays have an element for each of `count` places. */
typedef struct oxy_tail_results {
  uint32_t size;  /* set by the caller */
  uint32_t count; /* places of `sums`, grad_norms, param_norms and update_norms: more than the largest stream */
  float* grad_norm;
  float* found_inf;   /* 1 where the round was skipped for inf or NaN, its own or told */
  float* applied;     /* 0 where it was skipped for any reason, else 1 */
  int64_t* skipped;   /* one more for each skipped round */
  float* grad_norms;  /* sqrt(sums) / (grad_scale * grad_divisor) */
  float* param_norms; /* with OXY_TAIL_COLLECT, of the tensors with a gradient; others keep their value */
  float* update_norms;
} oxy_tail_results;

#define OXY_KERNELS_VERSION 1u

struct oxy_kernels {
  uint32_t size;
  uint32_t version; /* OXY_KERNELS_VERSION as the backend was compiled */

  /* Makes the tables for `count` tensors (host array); of each, numel, rows and the types but grad_type are fixed from
   * here on. OXY_INVALID_ARGUMENT for what oxytorch::kernels::StepTailPlan refuses. */
  oxy_status (*tail_create)(int32_t device, const oxy_tail_tensor* tensors, uint32_t count, oxy_tail* tail);
  oxy_status (*tail_destroy)(oxy_tail tail);
  /* Pointers, gradients' types and hyperparameters from here on; host arrays. `count` as in tail_create. Groups of one
   * tail may have different rules. */
  oxy_status (*tail_configure)(oxy_tail tail, oxy_queue queue, const oxy_tail_tensor* tensors, uint32_t count,
                               const oxy_tail_group* groups, uint32_t group_count);
  /* Sum of squares of each gradient (fp64) into sums[stream]; 0 where the gradient is NULL. Not finite if and only if
   * some element is not. */
  oxy_status (*tail_measure)(oxy_tail tail, oxy_queue queue, double* sums);
  /* The verdict over `results->count` sums, which may hold those of other tensors and of other processes too; added in
   * index order. Writes all of `results` but param_norms and update_norms. The host structures may go when the call
   * returns. */
  oxy_status (*tail_judge)(oxy_tail tail, oxy_queue queue, const double* sums, const oxy_tail_settings* settings,
                           const oxy_tail_results* results, oxy_tail_verdict* verdict);
  /* The update, by the verdict in device memory. Of `settings` it reads flags, clip_value, agc, agc_eps, ema_decay and
   * seed. */
  oxy_status (*tail_apply)(oxy_tail tail, oxy_queue queue, const oxy_tail_verdict* verdict,
                           const oxy_tail_settings* settings, const oxy_tail_results* results);
};

#ifdef __cplusplus
}
#endif
#endif /* OXYTORCH_BACKEND_KERNELS_H_ */
