/* Encodes rows of floats as codes of 8 or 4 bits, and decodes them. zerofn/kernels/codes.py builds it on first use. */
#include "native_codes.h"
#include "native_threads.h"

typedef struct {
    float *x;
    uint8_t *codes;
    float *scales;
    int64_t row, block; /* how many numbers are in a row, and in a block */
    int random; /* 1: bits depend on an element's place. 2: bits depend on the values in its block. 0: nearest */
    uint64_t seed, step, key, offset;
} job;

static void encode(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    int64_t blocks = (j->row + j->block - 1) / j->block;
    stream s = stream_of(j->seed, j->step, j->key, j->offset, 0);
    for (int64_t r = first; r < last; r++) {
        uint8_t *row = j->codes + r * bytes_of(j->row);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * j->block, n = least_of(j->block, j->row - at);
            const float *x = j->x + r * j->row + at;
            of_block all = seen(x, n);
            j->scales[r * blocks + b] = stored_scale(all);
            uint32_t counter = s.k0 + (uint32_t)(r * j->row + at) * ZF_STRIDE;
            if (j->random == 2) {
                uint32_t sum = 0, bits;
                for (int64_t i = 0; i < n; i++) {
                    memcpy(&bits, x + i, 4);
                    sum += bits;
                }
                counter = draw(sum, s.k0);
            }
            encode_block(x, row, at, n, &all, j->random, counter, s.k1);
        }
    }
}

static void decode(const void *what, int64_t first, int64_t last) {
    const job *j = what;
    int64_t blocks = (j->row + j->block - 1) / j->block;
    for (int64_t r = first; r < last; r++)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = b * j->block;
            decode_block(j->x + r * j->row + at, j->codes + r * bytes_of(j->row), at,
                         least_of(j->block, j->row - at), j->scales[r * blocks + b]);
        }
}

static void over_rows(task run_rows, const job *j, int64_t rows, int threads, parallel run) {
    int64_t each = GRAIN / (j->row > 0 ? j->row : 1);
    team t = {run_rows, j, rows, each > 0 ? each : 1, 0};
    share_out(&t, useful(threads, rows * j->row), run);
}

void zerofn_encode(const job *j, int64_t rows, int threads, parallel run) { over_rows(encode, j, rows, threads, run); }
void zerofn_decode(const job *j, int64_t rows, int threads, parallel run) { over_rows(decode, j, rows, threads, run); }
