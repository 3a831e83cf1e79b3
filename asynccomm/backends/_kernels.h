/* Reductions of values in memory: _kernels.c. */
#ifndef ASYNCCOMM_KERNELS_H
#define ASYNCCOMM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* in the order of kernels.DTYPES and kernels.OPERATORS */
enum { F32, F64, F16, BF16, I8, U8, I32, I64, DTYPES };
enum { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, OPERATORS };

/* Combine n elements of `count` sources, in their order, into `out`, which may be one of them; divide by
 * `divisor` if it is not 0. */
typedef void Kernel(void *out, void *const *sources, int count, size_t n, int divisor);

extern Kernel *const core_kernels[DTYPES][OPERATORS];
extern const int64_t core_item_bytes[DTYPES];

/* one binary for old and new processors; the loader picks the version */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) \
    && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_UNDEFINED__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#endif
