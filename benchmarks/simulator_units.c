/* Times of the native engine's numeric units, one line each: name, nanoseconds of one call. See simulator_units.py. */
#define _GNU_SOURCE
#include "units.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* 64 warps' worth of operands between -8 and 8, so that tables are met at many places. */
#define WARPS 64
static uint32_t a[WARPS][64], b[WARPS][64], c[WARPS][64], d[WARPS][64];
static float uniform(void) { return 16.0f * (float)rand() / (float)RAND_MAX - 8.0f; }
static void fill(uint32_t *x) {
    for (int i = 0; i < WARPS * 64; i++) {
        float f = uniform();
        memcpy(x + i, &f, 4);
    }
}

#define TIME(name, calls, call)                                                    \
    {                                                                              \
        double best = 1e18;                                                        \
        for (int round = 0; round < 20; round++) {                                 \
            double start = now();                                                  \
            for (int i = 0; i < (calls); i++) call;                                \
            double spent = (now() - start) / (calls);                              \
            best = spent < best ? spent : best;                                    \
        }                                                                          \
        printf("%s %.1f\n", name, best);                                           \
    }
#define LANES(name, call) TIME(name, 4096, { int w = i % WARPS; call; })
#define WIDE(x) (uint64_t *)(void *)x[w]

static uint16_t left[256 * 64], right[256 * 64];
static uint32_t sums[256 * 256];
static void product(const char *name, int m, int n, int k, units_type type) {
    TIME(name, 4, units_mma(m, n, k, type, left, type, right, sums, n, 1, NULL))
}

static void *read_table(const char *path, size_t bytes) {
    FILE *file = fopen(path, "rb");
    void *data = malloc(bytes);
    if (!file || !data || fread(data, 1, bytes, file) != bytes) exit(1);
    fclose(file);
    return data;
}

/* Arguments: files of the three tables. */
int main(int argc, char **argv) {
    if (argc != 4) return 2;
    units_tables t = {read_table(argv[1], 4u << 23), read_table(argv[2], 1u << 23), read_table(argv[3], 8u << 17)};
    fill(&a[0][0]), fill(&b[0][0]), fill(&c[0][0]);
    LANES("add_f32", units_add_f32_lanes(d[w], a[w], b[w], UNITS_RN, 0, ~0u))
    LANES("add_f32_rz", units_add_f32_lanes(d[w], a[w], b[w], UNITS_RZ, 0, ~0u))
    LANES("mul_f32", units_mul_f32_lanes(d[w], a[w], b[w], UNITS_RN, 0, ~0u))
    LANES("fma_f32", units_fma_f32_lanes(d[w], a[w], b[w], c[w], UNITS_RN, 0, ~0u))
    LANES("fma_f32_rm", units_fma_f32_lanes(d[w], a[w], b[w], c[w], UNITS_RM, 0, ~0u))
    LANES("fma_f32x2", units_fma_f32_pairs(WIDE(d), WIDE(a), WIDE(b), WIDE(c), UNITS_RN, 0, ~0u))
    LANES("max_f32", units_max_f32_lanes(d[w], a[w], b[w], 0, 0, ~0u))
    LANES("bf16x2", units_cvt_bf16x2_lanes(d[w], a[w], b[w], ~0u))
    LANES("f16x2", units_cvt_f16x2_lanes(d[w], a[w], b[w], ~0u))
    LANES("e4m3x2", units_cvt_e4m3x2_lanes(d[w], a[w], b[w], ~0u))
    LANES("ex2_ftz", units_ex2_ftz_lanes(&t, d[w], a[w], ~0u))
    LANES("lg2_ftz", units_lg2_ftz_lanes(&t, d[w], a[w], ~0u))
    LANES("rcp_ftz", units_rcp_ftz_lanes(&t, d[w], a[w], ~0u))
    LANES("tanh", units_tanh_lanes(d[w], a[w], ~0u))
    LANES("sin", units_sin_lanes(d[w], a[w], 1, ~0u))
    for (int i = 0; i < 256 * 64; i++) left[i] = (uint16_t)(a[0][i % 4096] >> 16), right[i] = (uint16_t)(b[0][i % 4096] >> 16);
    product("mma_bf16_64x128x64", 64, 128, 64, UNITS_BF16);
    product("mma_bf16_64x256x16", 64, 256, 16, UNITS_BF16);
    product("mma_f16_64x256x16", 64, 256, 16, UNITS_F16);
    product("mma_bf16_128x256x16", 128, 256, 16, UNITS_BF16);
    product("mma_bf16_256x256x16", 256, 256, 16, UNITS_BF16);
    return d[3][5] == 12345;
}
