/* Vectors of W floats in the compiler's own notation, so that one source serves NEON, AVX2 and whatever comes next.

   The flags ask for fused multiply-add wherever a product is added; nothing is ever reordered. Every result here is a
   function of its own row alone: how many rows a call brings, how they are tiled and which thread takes them must not
   change a bit of it. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if W == 16
#include <immintrin.h>
#endif
#ifndef W
#ifdef __AVX2__
#define W 8
#else
#define W 4
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias));

INLINE vec load(const float *from) { return (vec)(*(const loose *)from); }
INLINE void store(float *to, vec value) { *(loose *)to = (loose)value; }
INLINE vec splat(float value) { return value - (vec){0}; }
INLINE vec pick(ivec condition, vec yes, vec no) {
    return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

/* The larger of two and the smaller, lane by lane; the second where either is no number. */
INLINE vec larger(vec a, vec b) {
#if W == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}
INLINE vec smaller(vec a, vec b) {
#if W == 16
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return pick(a < b, a, b);
#endif
}

/* One over a finite number, to within a unit in the last place or so. */
INLINE vec inverse(vec x) {
#if W == 16
    vec y = (vec)_mm512_rcp14_ps((__m512)x);
    return y + y * (splat(1.0f) - x * y);
#else
    return splat(1.0f) / x;
#endif
}

/* sum + a * b, rounded once. Left to itself the compiler copies sums from register to register between unrolled steps. */
INLINE vec fused(vec sum, vec a, vec b) {
#if defined(__aarch64__) && W == 4
    __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

typedef float four __attribute__((vector_size(16)));
typedef float loose_four __attribute__((vector_size(16), aligned(4), may_alias));

/* Rows of x become columns: to[c][r] = x[r][c] for `width` rows, those past the last one zeros. */
INLINE void turn_rows(const float *x, long stride, long rows, long columns, float *to, long width) {
    long tall = rows / 4 * 4, wide = columns / 4 * 4;
    for (long r = 0; r < tall; r += 4)
        for (long c = 0; c < wide; c += 4) {
            const float *from = x + r * stride + c;
            four row[4];
            UNROLL for (int i = 0; i < 4; i++) row[i] = (four)(*(const loose_four *)(from + i * stride));
            four ab = __builtin_shufflevector(row[0], row[1], 0, 4, 2, 6), AB = __builtin_shufflevector(row[0], row[1], 1, 5, 3, 7);
            four cd = __builtin_shufflevector(row[2], row[3], 0, 4, 2, 6), CD = __builtin_shufflevector(row[2], row[3], 1, 5, 3, 7);
            row[0] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5), row[1] = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
            row[2] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7), row[3] = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
            UNROLL for (int i = 0; i < 4; i++) *(loose_four *)(to + (c + i) * width + r) = (loose_four)row[i];
        }
    for (long r = 0; r < width; r++)
        for (long c = r < tall ? wide : 0; c < columns; c++) to[c * width + r] = r < rows ? x[r * stride + c] : 0.0f;
}

/* W rows of W become W columns. */
#if W <= 8
INLINE void transpose(vec *m) {
#define SWAP(a, b, ...)                                                                                                \
    do {                                                                                                               \
        vec first = __builtin_shufflevector(m[a], m[b], FIRST);                                                        \
        m[b] = __builtin_shufflevector(m[a], m[b], SECOND);                                                            \
        m[a] = first;                                                                                                  \
    } while (0)
#if W == 4
#define FIRST 0, 4, 2, 6
#define SECOND 1, 5, 3, 7
    SWAP(0, 1);
    SWAP(2, 3);
#undef FIRST
#undef SECOND
#define FIRST 0, 1, 4, 5
#define SECOND 2, 3, 6, 7
    SWAP(0, 2);
    SWAP(1, 3);
#undef FIRST
#undef SECOND
#else
#define FIRST 0, 8, 2, 10, 4, 12, 6, 14
#define SECOND 1, 9, 3, 11, 5, 13, 7, 15
    SWAP(0, 1);
    SWAP(2, 3);
    SWAP(4, 5);
    SWAP(6, 7);
#undef FIRST
#undef SECOND
#define FIRST 0, 1, 8, 9, 4, 5, 12, 13
#define SECOND 2, 3, 10, 11, 6, 7, 14, 15
    SWAP(0, 2);
    SWAP(1, 3);
    SWAP(4, 6);
    SWAP(5, 7);
#undef FIRST
#undef SECOND
#define FIRST 0, 1, 2, 3, 8, 9, 10, 11
#define SECOND 4, 5, 6, 7, 12, 13, 14, 15
    SWAP(0, 4);
    SWAP(1, 5);
    SWAP(2, 6);
    SWAP(3, 7);
#undef FIRST
#undef SECOND
#endif
#undef SWAP
}
#endif

/* The sum of a vector's lanes, in halves: always the same tree. */
INLINE float lane_sum(vec v) {
    float part[W];
    store(part, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

INLINE float lane_max(vec v) {
    float part[W], most;
    store(part, v);
    most = part[0];
    for (int i = 1; i < W; i++) most = part[i] > most ? part[i] : most;
    return most;
}

/* e^x to within two units in the last place; 1 at 0 exactly; 0 far below; infinity far above; NaN stays. */
INLINE vec vexp(vec x) {
#if W == 16
    x = smaller(splat(104.0f), larger(splat(-104.0f), x));
    vec n = (vec)_mm512_roundscale_ps((__m512)(x * splat(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec n = (x * splat(1.44269504f) + magic) - magic;
    ivec low = x < splat(-87.3f), high = x > splat(88.7f);
#endif
    vec r = x - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + (r + splat(1.0f));
#if W == 16
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* 2^n in two halves, because 2^128 is not a float. */
    ivec whole = __builtin_convertvector(pick(low | high, splat(0.0f), n), ivec), half = whole >> 1;
    p = p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
    p = pick(low, splat(0.0f), p);
    return pick(high, splat(INFINITY), p);
#endif
}

INLINE float exp1(float x) { return vexp(splat(x))[0]; }

INLINE vec silu_gate(vec g, vec u) { return (g / (splat(1.0f) + vexp(-g))) * u; }

/* gpt-oss's gate: both halves held within bounds, and up moved by one. */
INLINE vec clamped_gate(vec g, vec u) {
    vec most = splat(7.0f);
    g = pick(g > most, most, g), u = pick(u > most, most, pick(u < -most, -most, u));
    return (g / (splat(1.0f) + vexp(splat(-1.702f) * g))) * (u + splat(1.0f));
}

enum { BY_SILU, BY_CLAMPED, BY_SIGMOID };

INLINE void gate_row(const float *gate, const float *up, float *y, long size, float scale, int kind) {
    for (long i = 0; i < size; i += W) {
        vec g, u;
        if (i + W <= size) g = load(gate + i), u = load(up + i);
        else {
            g = u = splat(0.0f);
            for (long j = 0; i + j < size; j++) g[j] = gate[i + j], u[j] = up[i + j];
        }
        vec out = kind == BY_SIGMOID ? u / (splat(1.0f) + vexp(-g)) : kind == BY_CLAMPED ? clamped_gate(g, u) : silu_gate(g, u);
        out = out * splat(scale);
        if (i + W <= size) store(y + i, out);
        else
            for (long j = 0; i + j < size; j++) y[i + j] = out[j];
    }
}

/* silu(gate) * up * scale. */
INLINE void swiglu_row(const float *gate, const float *up, float *y, long size, float scale) {
    gate_row(gate, up, y, size, scale, BY_SILU);
}

INLINE void clamped_swiglu_row(const float *gate, const float *up, float *y, long size, float scale) {
    gate_row(gate, up, y, size, scale, BY_CLAMPED);
}
