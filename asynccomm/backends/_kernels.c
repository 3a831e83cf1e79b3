/* The kernels of reductions. */
#include "_kernels.h"

#include <string.h>

#define BLOCK 1024 /* elements that are combined before they are stored: they stay in the first cache */

/* Integers wrap around, hence unsigned. The first operand wins where two are equal, and a NaN always. */
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LESS(a, b) ((b) < (a) ? (b) : (a))
#define MORE(a, b) ((b) > (a) ? (b) : (a))
#define LESS_OR_NAN(a, b) ((b) < (a) || ((b) != (b) && (a) == (a)) ? (b) : (a))
#define MORE_OR_NAN(a, b) ((b) > (a) || ((b) != (b) && (a) == (a)) ? (b) : (a))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))

/* W: the type that values are combined in */
#define KERNEL(NAME, T, W, COMBINE)                                                                                    \
    CLONES static void NAME(void *out_, void *const *sources, int count, size_t n, int divisor)                        \
    {                                                                                                                  \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                     \
            size_t m = n - at < BLOCK ? n - at : BLOCK;                                                                \
            T *out = (T *)out_ + at;                                                                                   \
            const T *a = (const T *)sources[0] + at, *b = (const T *)sources[count > 1] + at;                          \
            if (count == 2 && !divisor) {                                                                              \
                for (size_t i = 0; i < m; i++) out[i] = (T)COMBINE((W)a[i], (W)b[i]);                                  \
                continue;                                                                                              \
            }                                                                                                          \
            T total[BLOCK];                                                                                            \
            if (count == 1) memcpy(total, a, m * sizeof(T));                                                           \
            else for (size_t i = 0; i < m; i++) total[i] = (T)COMBINE((W)a[i], (W)b[i]);                               \
            for (int k = 2; k < count; k++) {                                                                          \
                const T *c = (const T *)sources[k] + at;                                                               \
                for (size_t i = 0; i < m; i++) total[i] = (T)COMBINE((W)total[i], (W)c[i]);                            \
            }                                                                                                          \
            if (divisor) for (size_t i = 0; i < m; i++) total[i] = (T)(total[i] / (T)divisor);                         \
            memcpy(out, total, m * sizeof(T));                                                                         \
        }                                                                                                              \
    }

#define FLOATS(NAME, T)                                                                                                \
    KERNEL(NAME##_sum, T, T, ADD) KERNEL(NAME##_product, T, T, MULTIPLY)                                               \
    KERNEL(NAME##_min, T, T, LESS_OR_NAN) KERNEL(NAME##_max, T, T, MORE_OR_NAN)
#define INTEGERS(NAME, T, UNSIGNED)                                                                                    \
    KERNEL(NAME##_sum, T, UNSIGNED, ADD) KERNEL(NAME##_product, T, UNSIGNED, MULTIPLY)                                 \
    KERNEL(NAME##_min, T, T, LESS) KERNEL(NAME##_max, T, T, MORE)                                                      \
    KERNEL(NAME##_and, T, T, AND) KERNEL(NAME##_or, T, T, OR) KERNEL(NAME##_xor, T, T, XOR)

FLOATS(f32, float)
FLOATS(f64, double)
INTEGERS(i8, int8_t, uint8_t)
INTEGERS(u8, uint8_t, uint8_t)
INTEGERS(i32, int32_t, uint32_t)
INTEGERS(i64, int64_t, uint64_t)

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bf16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }
static inline uint16_t to_bf16(float value) /* to the nearest, ties to even */
{
    uint32_t bits = bits_of_float(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* exponents of half and float differ by 112; the product also normalises what is subnormal */
    return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
}
static inline uint16_t to_f16(float value)
{
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more */
    if (rest < 0x38800000) /* subnormal: the addition rounds to multiples of 2**-24 */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

/* Halves are widened, combined in float, divided, and rounded once. */
#define HALVES(NAME, FROM, TO, COMBINE)                                                                                \
    CLONES static void NAME(void *out_, void *const *sources, int count, size_t n, int divisor)                        \
    {                                                                                                                  \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                     \
            size_t m = n - at < BLOCK ? n - at : BLOCK;                                                                \
            uint16_t *out = (uint16_t *)out_ + at;                                                                     \
            float total[BLOCK];                                                                                        \
            for (size_t i = 0; i < m; i++) total[i] = FROM(((const uint16_t *)sources[0] + at)[i]);                    \
            for (int k = 1; k < count; k++) {                                                                          \
                const uint16_t *c = (const uint16_t *)sources[k] + at;                                                 \
                for (size_t i = 0; i < m; i++) {                                                                       \
                    float value = FROM(c[i]);                                                                          \
                    total[i] = COMBINE(total[i], value);                                                               \
                }                                                                                                      \
            }                                                                                                          \
            if (divisor) for (size_t i = 0; i < m; i++) total[i] /= (float)divisor;                                    \
            for (size_t i = 0; i < m; i++) out[i] = TO(total[i]);                                                      \
        }                                                                                                              \
    }
#define BY_FLOAT(FROM, RELATION, a, b) (FROM(b) RELATION FROM(a) || (FROM(b) != FROM(b) && FROM(a) == FROM(a)) ? (b) : (a))
#define F16_LESS(a, b) BY_FLOAT(from_f16, <, a, b)
#define F16_MORE(a, b) BY_FLOAT(from_f16, >, a, b)
#define BF16_LESS(a, b) BY_FLOAT(from_bf16, <, a, b)
#define BF16_MORE(a, b) BY_FLOAT(from_bf16, >, a, b)

HALVES(f16_sum, from_f16, to_f16, ADD)
HALVES(f16_product, from_f16, to_f16, MULTIPLY)
KERNEL(f16_min, uint16_t, uint16_t, F16_LESS)
KERNEL(f16_max, uint16_t, uint16_t, F16_MORE)
HALVES(bf16_sum, from_bf16, to_bf16, ADD)
HALVES(bf16_product, from_bf16, to_bf16, MULTIPLY)
KERNEL(bf16_min, uint16_t, uint16_t, BF16_LESS)
KERNEL(bf16_max, uint16_t, uint16_t, BF16_MORE)

Kernel *const core_kernels[DTYPES][OPERATORS] = {
    [F32] = {f32_sum, f32_product, f32_min, f32_max, NULL, NULL, NULL},
    [F64] = {f64_sum, f64_product, f64_min, f64_max, NULL, NULL, NULL},
    [F16] = {f16_sum, f16_product, f16_min, f16_max, NULL, NULL, NULL},
    [BF16] = {bf16_sum, bf16_product, bf16_min, bf16_max, NULL, NULL, NULL},
    [I8] = {i8_sum, i8_product, i8_min, i8_max, i8_and, i8_or, i8_xor},
    [U8] = {u8_sum, u8_product, u8_min, u8_max, u8_and, u8_or, u8_xor},
    [I32] = {i32_sum, i32_product, i32_min, i32_max, i32_and, i32_or, i32_xor},
    [I64] = {i64_sum, i64_product, i64_min, i64_max, i64_and, i64_or, i64_xor},
};
const int64_t core_item_bytes[DTYPES] = {[F32] = 4, [F64] = 8, [F16] = 2, [BF16] = 2, [I8] = 1, [U8] = 1, [I32] = 4, [I64] = 8};

