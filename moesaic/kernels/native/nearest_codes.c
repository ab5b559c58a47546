/* Vectors to codes. A vector is first turned by a fixed rotation, three rounds of signs and Hadamard transforms of blocks
   with a transposition between, so that its length is spread evenly over all numbers, and one unit serves them all. */
#include "nearest.h"

/* `size` is a multiple of `block`, which is a power of two. */
static void turn(float *x, float *free, const float *signs, long size, long block) {
    float scale = 1.0f / sqrtf((float)block);
    long blocks = size / block;
    for (int round = 0; round < 3; round++) {
        for (long i = 0; i < size; i++) x[i] *= signs[round * size + i];
        for (long b = 0; b < size; b += block)
            for (long half = 1; half < block; half *= 2)
                for (long i = b; i < b + block; i += 2 * half)
                    for (long j = i; j < i + half; j++) {
                        float first = x[j], second = x[j + half];
                        x[j] = first + second, x[j + half] = first - second;
                    }
        for (long b = 0; b < blocks; b++)
            for (long i = 0; i < block; i++) free[i * blocks + b] = x[b * block + i] * scale;
        memcpy(x, free, 4 * size);
    }
}

/* Codes of 8 bits, and what they count. */
static float round_off(const float *x, int8_t *codes, long size) {
    float most = 0.0f;
    for (long i = 0; i < size; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    if (most == 0.0f) {
        for (long i = 0; i < size; i++) codes[i] = 0;
        return 0.0f;
    }
    float scale = 127.0f / most;
    for (long i = 0; i < size; i++) codes[i] = (int8_t)rintf(x[i] * scale);
    return most / 127.0f;
}

static void place(const float *from, const float *middle, float *x, float *free, const float *signs, long given,
                  long size, long block) {
    for (long i = 0; i < given; i++) x[i] = middle ? from[i] - middle[i] : from[i];
    memset(x + given, 0, 4 * (size - given));
    turn(x, free, signs, size, block);
}

void nearest_encode(const float *rows, long count, long given, const float *middle, const float *signs, long size,
                    long block, int bits, uint8_t *records, long stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long n = 0; n < count; n++) {
        float x[2 * size], unit, length = 0.0f;
        place(rows + n * given, middle, x, x + size, signs, given, size, block);
        uint8_t *to = records + n * stride;
        for (long i = 0; i < size; i++) length += x[i] * x[i];
        if (bits == 8) {
            unit = round_off(x, (int8_t *)to, size);
            /* Of the vector that the codes stand for: distances are then those of real points, to the last bit. */
            length = unit * unit * (float)dot8((int8_t *)to, (int8_t *)to, size);
        } else {
            float step = 0.335f * sqrtf(length / (float)size), product = 0.0f, square = 0.0f;
            for (long i = 0; i < size; i += 32)
                for (long j = 0; j < 16; j++) {
                    uint8_t halves[2];
                    for (int h = 0; h < 2; h++) {
                        float number = x[i + 16 * h + j];
                        float code = step > 0.0f ? floorf(number / step) + 8.0f : 8.0f;
                        code = code < 0.0f ? 0.0f : code > 15.0f ? 15.0f : code;
                        halves[h] = (uint8_t)code;
                        product += number * (code - 7.5f), square += (code - 7.5f) * (code - 7.5f);
                    }
                    to[i / 2 + j] = (uint8_t)(halves[0] | halves[1] << 4);
                }
            unit = product / square;
        }
        memcpy(to + size * bits / 8, &unit, 4);
        memcpy(to + size * bits / 8 + 4, &length, 4);
    }
}

/* A query: codes of 8 bits, and their unit. */
float nearest_query(const float *query, long given, const float *middle, const float *signs, long size, long block,
                    int8_t *codes) {
    float x[2 * size];
    place(query, middle, x, x + size, signs, given, size, block);
    return round_off(x, codes, size);
}
