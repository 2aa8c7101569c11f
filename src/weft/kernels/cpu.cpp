// Encoders and decoders at the speed of memory: one read of the gradient, everything else in the first-level cache.
// Plain loops that compilers vectorize, and a few intrinsics where they do not. Multiply-adds are not fused, so that decoded
// values have the same bits as PyTorch's own operations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

using i64 = int64_t;

static inline uint32_t magnitude(float x) {  // ordered as absolute values are
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}

static inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

static inline float uniform(uint32_t i, uint32_t key) {  // in [0, 1), from a counter: MurmurHash3's finalizer
    uint32_t x = i * 0x9E3779B9u + key;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    x ^= x >> 16;
    return (float)(int32_t)(x >> 8) * 0x1p-24f;
}

static inline float largest(const float *x, i64 n) {
    uint32_t most = 0;
    for (i64 i = 0; i < n; i++) {
        uint32_t m = magnitude(x[i]);
        most = m > most ? m : most;
    }
    return as_float(most);
}

// Signs of up to 64 values, one bit each, 1 for negative ones.
static inline uint64_t signs_of(const float *x, i64 n) {
    uint64_t bits = 0;
#if defined(__AVX512F__)
    if (n == 64) {
        for (int j = 0; j < 4; j++) {
            __mmask16 m = _mm512_movepi32_mask(_mm512_castps_si512(_mm512_loadu_ps(x + 16 * j)));
            bits |= (uint64_t)m << (16 * j);
        }
        return bits;
    }
#elif defined(__AVX2__)
    if (n == 64) {
        for (int j = 0; j < 8; j++) bits |= (uint64_t)(uint8_t)_mm256_movemask_ps(_mm256_loadu_ps(x + 8 * j)) << (8 * j);
        return bits;
    }
#endif
    for (i64 i = 0; i < n; i++) {
        uint32_t b;
        std::memcpy(&b, x + i, 4);
        bits |= (uint64_t)(b >> 31) << i;
    }
    return bits;
}

// Codes of `width` bits, eight in `width` bytes.
static inline void pack(const uint8_t *codes, i64 n, int width, uint8_t *out) {
    i64 at = 0;
    for (; at + 8 <= n; at += 8, out += width) {
        uint64_t word = 0;
        std::memcpy(&word, codes + at, 8);
#if defined(__BMI2__)
        word = _pext_u64(word, 0x0101010101010101ull * ((1u << width) - 1));
#else
        uint64_t packed = 0;
        for (int j = 0; j < 8; j++) packed |= (word >> (8 * j) & 0xff) << (width * j);
        word = packed;
#endif
        if ((n - at) * width >= 64)
            std::memcpy(out, &word, 8);  // what is too much is overwritten by the next
        else
            std::memcpy(out, &word, width);
    }
    if (at < n) {
        uint64_t word = 0;
        for (i64 j = at; j < n; j++) word |= (uint64_t)codes[j] << (width * (j - at));
        std::memcpy(out, &word, ((n - at) * width + 7) / 8);
    }
}

static inline void unpack(const uint8_t *in, i64 n, int width, uint8_t *codes) {
    i64 at = 0;
    for (; at + 8 <= n; at += 8, in += width) {
        uint64_t word = 0;
        if ((n - at) * width >= 64)
            std::memcpy(&word, in, 8);
        else
            std::memcpy(&word, in, width);
#if defined(__BMI2__)
        word = _pdep_u64(word, 0x0101010101010101ull * ((1u << width) - 1));
#else
        uint64_t spread = 0;
        for (int j = 0; j < 8; j++) spread |= (word >> (width * j) & ((1u << width) - 1)) << (8 * j);
        word = spread;
#endif
        std::memcpy(codes + at, &word, 8);
    }
    if (at < n) {
        uint64_t word = 0;
        std::memcpy(&word, in, ((n - at) * width + 7) / 8);
        for (i64 j = at; j < n; j++) codes[j] = word >> (width * (j - at)) & ((1u << width) - 1);
    }
}

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t w16 __attribute__((vector_size(64)));

static inline v16 load(const float *x) {
    v16 v;
    std::memcpy(&v, x, 64);
    return v;
}

static inline v16 absolute(v16 v) { return (v16)((w16)v & 0x7fffffff); }

static inline double sum(v16 v) {
    double total = 0;
    for (int j = 0; j < 16; j++) total += v[j];
    return total;
}

// One of two values for each bit, written or added.
template <bool ADD> static inline void spread(const uint8_t *bits, i64 n, float up, float down, float *out) {
    i64 i = 0;
    const v16 ups = up - v16{}, downs = down - v16{};
    const w16 each = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    for (; i + 16 <= n; i += 16) {
        uint16_t word;
        std::memcpy(&word, bits + i / 8, 2);
        v16 v = (w16{} + (int32_t)word & each) != 0 ? downs : ups;
        if (ADD) v = load(out + i) + v;
        std::memcpy(out + i, &v, 64);
    }
    for (; i < n; i++) {
        float value = bits[i / 8] >> (i % 8) & 1 ? down : up;
        out[i] = ADD ? out[i] + value : value;
    }
}

// The input of an encoder: x, or with a pending residual their sum, which is stored in the residual.
static inline const float *due(const float *x, float *owed, int behind, i64 start, i64 n) {
    if (!behind) return x + start;
    for (i64 i = start; i < start + n; i++) owed[i] += x[i];
    return owed + start;
}

static const i64 CHUNK = 1024;  // values that stay in the first-level cache; a multiple of 64

extern "C" {

// --- int8: a scale for each block ---------------------------------------------------------------------------------------

void int8_encode(const float *x, i64 n, i64 block, int8_t *codes, float *scales, float *owed, int behind, int random,
                 uint32_t key) {
    for (i64 start = 0, b = 0; start < n; start += block, b++) {
        i64 size = std::min(block, n - start);
        const float *from = due(x, owed, behind, start, size);
        int8_t *to = codes + start;
        float scale = largest(from, size) / 127.0f;
        float inverse = 1.0f / scale;
        if (!(scale > 0.0f) || !(inverse <= 3.4e38f)) scale = inverse = 0.0f;
        scales[b] = scale;
        if (random)
            for (i64 i = 0; i < size; i++) {
                float q = std::floor(from[i] * inverse + uniform((uint32_t)(start + i), key));
                to[i] = (int8_t)(int32_t)std::min(127.0f, std::max(-127.0f, q));
            }
        else
            for (i64 i = 0; i < size; i++) {
                float q = std::nearbyint(from[i] * inverse);
                to[i] = (int8_t)(int32_t)std::min(127.0f, std::max(-127.0f, q));
            }
        if (owed) {
            float *rest = owed + start;
            for (i64 i = 0; i < size; i++) rest[i] = from[i] - (float)to[i] * scale;
        }
    }
}

void int8_decode(const int8_t *codes, const float *scales, i64 n, i64 block, float *out, int add) {
    for (i64 start = 0, b = 0; start < n; start += block, b++) {
        i64 size = std::min(block, n - start);
        const int8_t *from = codes + start;
        float *to = out + start;
        float scale = scales[b];
        if (add)
            for (i64 i = 0; i < size; i++) to[i] += (float)from[i] * scale;
        else
            for (i64 i = 0; i < size; i++) to[i] = (float)from[i] * scale;
    }
}

// --- one bit: signs, and two values for each row ------------------------------------------------------------------------

static void sign_rest(const float *x, i64 n, float up, float down, float *owed) {
    for (i64 i = 0; i < n; i++) owed[i] = x[i] - (std::signbit(x[i]) ? down : up);
}

// Packed signs of x (1: negative), and their magnitude: the mean of |x| if scaled, else 1, or 0 if all values are zero.
void sign_encode(const float *x, i64 n, uint8_t *bits, float *scale, int scaled, float *owed, int behind) {
    double total = 0;
    for (i64 start = 0; start < n; start += CHUNK) {
        i64 size = std::min(CHUNK, n - start), i = 0;
        const float *from = due(x, owed, behind, start, size);
        v16 sizes = {};
        for (; i + 16 <= size; i += 16) sizes += absolute(load(from + i));
        for (; i < size; i++) total += std::fabs(from[i]);
        total += sum(sizes);
        for (i64 k = 0; k < size; k += 64) {
            i64 some = std::min<i64>(64, size - k);
            uint64_t word = signs_of(from + k, some);
            std::memcpy(bits + (start + k) / 8, &word, (some + 7) / 8);
        }
    }
    *scale = scaled ? (float)(total / n) : (float)(total > 0);
    if (owed) sign_rest(behind ? owed : x, n, *scale, -*scale, owed);
}

// The bits of each row start at a new byte. values[2 r], values[2 r + 1]: the decoded value of row r's other and negative values.
void onebit_encode(const float *x, i64 rows, i64 width, uint8_t *bits, float *values, float *owed, int behind) {
    i64 stride = (width + 7) / 8;
    for (i64 r = 0; r < rows; r++) {
        const float *row = due(x, owed, behind, r * width, width);
        double all = 0, sizes = 0;
        i64 negative = 0;
        for (i64 start = 0; start < width; start += CHUNK) {
            i64 size = std::min(CHUNK, width - start), i = 0;
            const float *from = row + start;
            v16 plain = {}, positive = {};
            for (; i + 16 <= size; i += 16) {
                v16 v = load(from + i);
                plain += v;
                positive += absolute(v);
            }
            for (; i < size; i++) all += from[i], sizes += std::fabs(from[i]);
            all += sum(plain), sizes += sum(positive);
            for (i64 k = 0; k < size; k += 64) {
                i64 some = std::min<i64>(64, size - k);
                uint64_t word = signs_of(from + k, some);
                negative += __builtin_popcountll(word);
                std::memcpy(bits + r * stride + (start + k) / 8, &word, (some + 7) / 8);
            }
        }
        i64 other = width - negative;
        float up = other ? (float)((sizes + all) / 2 / other) : 0.0f;
        float down = negative ? (float)((all - sizes) / 2 / negative) : 0.0f;
        values[2 * r] = up;
        values[2 * r + 1] = down;
        if (owed) sign_rest(row, width, up, down, owed + r * width);
    }
}

void onebit_decode(const uint8_t *bits, const float *values, i64 rows, i64 width, float *out, int add) {
    i64 stride = (width + 7) / 8;
    for (i64 r = 0; r < rows; r++) {
        float up = values[2 * r], down = values[2 * r + 1];
        if (add)
            spread<true>(bits + r * stride, width, up, down, out + r * width);
        else
            spread<false>(bits + r * stride, width, up, down, out + r * width);
    }
}

// --- a few levels, packed -----------------------------------------------------------------------------------------------

// QSGD: for each bucket its norm (top: its largest value), and for each value the level (|x| / norm) levels, rounded at random, shifted by `levels`.
void qsgd_encode(const float *x, i64 n, i64 bucket, int levels, int width, int top, uint8_t *out, float *norms, float *owed,
                 int behind, uint32_t key) {
    uint8_t codes[CHUNK];
    for (i64 first = 0, b = 0; first < n; first += bucket, b++) {
        i64 whole = std::min(bucket, n - first), i = 0;
        const float *all = due(x, owed, behind, first, whole);
        float most = largest(all, whole);
        float shrink = most > 1e15f || most < 1e-15f ? 1.0f / most : 1.0f;  // so that squares stay in range
        if (!(shrink <= 3.4e38f)) shrink = 0.0f;
        v16 squares = {};
        double total = 0;
        for (; !top && i + 16 <= whole; i += 16) {
            v16 v = load(all + i) * shrink;
            squares += v * v;
        }
        for (; !top && i < whole; i++) total += (double)(all[i] * shrink) * (all[i] * shrink);
        total += sum(squares);
        float norm = top ? most : shrink > 0.0f ? (float)std::min(3.4028234e38, std::sqrt(total) / shrink) : 0.0f;
        float factor = (float)levels / norm, unit = norm / (float)levels;
        if (!(norm > 0.0f) || !(factor <= 3.4e38f)) norm = factor = unit = 0.0f;
        norms[b] = norm;
        for (i64 start = first; start < first + whole; start += CHUNK) {
            i64 size = std::min(CHUNK, first + whole - start);
            const float *from = all + (start - first);
            for (i = 0; i < size; i++) {
                float q = std::floor(std::fabs(from[i]) * factor + uniform((uint32_t)(start + i), key));
                int32_t level = (int32_t)std::min((float)levels, q);  // in this order NaN, as peers may send it, has a level too
                codes[i] = (uint8_t)(levels + (std::signbit(from[i]) ? -level : level));
            }
            pack(codes, size, width, out + start / 8 * width);
            if (owed)
                for (i = 0; i < size; i++) owed[start + i] = from[i] - (float)((int)codes[i] - levels) * unit;
        }
    }
}

void qsgd_decode(const uint8_t *in, const float *norms, i64 n, i64 bucket, int levels, int width, float *out, int add) {
    uint8_t codes[CHUNK];
    for (i64 start = 0; start < n; start += CHUNK) {
        i64 end = std::min(n, start + CHUNK);
        unpack(in + start / 8 * width, end - start, width, codes);
        for (i64 first = start; first < end;) {  // as far as one norm reaches
            i64 b = first / bucket, size = std::min(end, (b + 1) * bucket) - first;
            float unit = norms[b] / (float)levels, *to = out + first;
            const uint8_t *from = codes + (first - start);
            if (add)
                for (i64 i = 0; i < size; i++) to[i] += (float)((int)from[i] - levels) * unit;
            else
                for (i64 i = 0; i < size; i++) to[i] = (float)((int)from[i] - levels) * unit;
            first += size;
        }
    }
}

// Three values: -scale, 0, scale. random: with probability |x| / scale, clipped; else where |x| reaches the scale.
void ternary_encode(const float *x, i64 n, float scale, int random, uint32_t key, uint8_t *out, float *owed, int behind) {
    uint8_t codes[CHUNK];
    float inverse = 1.0f / scale;
    if (!(scale > 0.0f) || !(inverse <= 3.4e38f)) inverse = 0.0f;
    for (i64 start = 0; start < n; start += CHUNK) {
        i64 size = std::min(CHUNK, n - start);
        const float *from = due(x, owed, behind, start, size);
        if (random)
            for (i64 i = 0; i < size; i++) {
                float a = std::min(std::fabs(from[i]), scale);
                int32_t sent = a * inverse > uniform((uint32_t)(start + i), key);
                codes[i] = (uint8_t)(1 + (std::signbit(from[i]) ? -sent : sent));
            }
        else
            for (i64 i = 0; i < size; i++) {
                int32_t sent = std::fabs(from[i]) >= scale;
                codes[i] = (uint8_t)(1 + (std::signbit(from[i]) ? -sent : sent));
            }
        pack(codes, size, 2, out + start / 4);
        if (owed)
            for (i64 i = 0; i < size; i++) owed[start + i] = from[i] - (float)((int)codes[i] - 1) * scale;
    }
}

void ternary_decode(const uint8_t *in, i64 n, float scale, float *out, int add) {
    uint8_t codes[CHUNK];
    for (i64 start = 0; start < n; start += CHUNK) {
        i64 size = std::min(CHUNK, n - start);
        unpack(in + start / 4, size, 2, codes);
        float *to = out + start;
        if (add)
            for (i64 i = 0; i < size; i++) to[i] += (float)((int)codes[i] - 1) * scale;
        else
            for (i64 i = 0; i < size; i++) to[i] = (float)((int)codes[i] - 1) * scale;
    }
}

// The largest absolute value, the sum, and the sum of squares.
void moments(const float *x, i64 n, double *found) {
    uint32_t top = 0;
    double all = 0, squares = 0;
    for (i64 start = 0; start < n; start += CHUNK) {
        i64 size = std::min(CHUNK, n - start), i = 0;
        const float *from = x + start;
        v16 plain = {}, squared = {};
        for (; i + 16 <= size; i += 16) {
            v16 v = load(from + i);
            plain += v;
            squared += v * v;
        }
        for (; i < size; i++) all += from[i], squares += (double)from[i] * from[i];
        all += sum(plain), squares += sum(squared);
        top = std::max(top, magnitude(largest(from, size)));
    }
    found[0] = as_float(top);
    found[1] = all;
    found[2] = squares;
}

// --- thin matrices --------------------------------------------------------------------------------------------------------

// p = m q', for thin q of `rank` rows: each value of m is read once. With a residual: the sum of both, which is stored in the residual.
void thin_right(const float *m, i64 rows, i64 columns, const float *q, int rank, float *p, float *owed) {
    for (i64 r = 0; r < rows; r += 4) {
        int some = (int)std::min<i64>(4, rows - r);
        const float *from = due(m, owed, owed != nullptr, r * columns, some * columns);
        for (int k = 0; k < rank; k++) {
            const float *other = q + k * columns;
            v16 sums[4] = {};
            double rest[4] = {};
            i64 j = 0;
            for (; j + 16 <= columns; j += 16) {
                v16 right = load(other + j);
                for (int a = 0; a < some; a++) sums[a] += load(from + a * columns + j) * right;
            }
            for (; j < columns; j++)
                for (int a = 0; a < some; a++) rest[a] += (double)from[a * columns + j] * other[j];
            for (int a = 0; a < some; a++) p[(r + a) * rank + k] = (float)(sum(sums[a]) + rest[a]);
        }
    }
}

// q += p' m.
void thin_left(const float *m, i64 rows, i64 columns, const float *p, int rank, float *q) {
    for (i64 r = 0; r < rows; r += 4) {
        int some = (int)std::min<i64>(4, rows - r);
        for (i64 start = 0; start < columns; start += CHUNK) {
            i64 size = std::min(CHUNK, columns - start);
            for (int k = 0; k < rank; k++) {
                float *to = q + k * columns + start;
                const float *from = m + r * columns + start;
                float a = p[r * rank + k];
                if (some == 4) {
                    float b = p[(r + 1) * rank + k], c = p[(r + 2) * rank + k], d = p[(r + 3) * rank + k];
                    for (i64 j = 0; j < size; j++)
                        to[j] += (a * from[j] + b * from[j + columns]) + (c * from[j + 2 * columns] + d * from[j + 3 * columns]);
                } else {
                    for (int i = 0; i < some; i++)
                        for (i64 j = 0; j < size; j++) to[j] += p[(r + i) * rank + k] * from[j + i * columns];
                }
            }
        }
    }
}

// out = p q, or m - p q; the terms of a value are added in the order of the ranks, so that its bits are the same everywhere.
void thin_product(const float *p, const float *q, i64 rows, i64 columns, int rank, const float *m, float *out) {
    for (i64 r = 0; r < rows; r++) {
        const float *left = p + r * rank;
        for (i64 start = 0; start < columns; start += CHUNK) {
            i64 size = std::min(CHUNK, columns - start);
            float values[CHUNK];
            for (i64 j = 0; j < size; j++) values[j] = left[0] * q[start + j];
            for (int k = 1; k < rank; k++) {
                const float *right = q + k * columns + start;
                for (i64 j = 0; j < size; j++) values[j] += left[k] * right[j];
            }
            float *to = out + r * columns + start;
            if (m) {
                const float *from = m + r * columns + start;
                for (i64 j = 0; j < size; j++) to[j] = from[j] - values[j];
            } else {
                std::memcpy(to, values, size * sizeof(float));
            }
        }
    }
}

// --- narrower floats ----------------------------------------------------------------------------------------------------

// To bfloat16, to the nearest, ties to even, as PyTorch does; all values are finite.
void bf16_encode(const float *x, i64 n, uint16_t *out, float *owed) {
    for (i64 i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1);
        out[i] = (uint16_t)(rounded >> 16);
        if (owed) owed[i] = x[i] - as_float(rounded & 0xffff0000u);
    }
}

// --- a few indices -------------------------------------------------------------------------------------------------------

// Indices, in ascending order, of values whose magnitude is at least `least`; returns their number, or -1 - (number so far) if
// there are more than `room`.
static i64 places_of(const float *x, i64 n, uint32_t least, int32_t *places, i64 room) {
    i64 found = 0, i = 0;
#if defined(__AVX512F__)
    __m512i mask = _mm512_set1_epi32(0x7fffffff), bar = _mm512_set1_epi32((int)least), sixteen = _mm512_set1_epi32(16);
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n; i += 16, index = _mm512_add_epi32(index, sixteen)) {
        __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), mask);
        __mmask16 m = _mm512_cmpge_epi32_mask(bits, bar);
        if (m) {
            if (found + 16 > room) break;
            _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(m, index));
            found += __builtin_popcount(m);
        }
    }
#endif
    for (; i < n; i++)
        if (magnitude(x[i]) >= least) {
            if (found == room) return -1 - found;
            places[found++] = (int32_t)i;
        }
    return found;
}

// The first indices of values of magnitude `least` or more; returns the number written.
i64 places_from(const float *x, i64 n, float least, int32_t *places, i64 room) {
    i64 found = places_of(x, n, magnitude(least), places, room);
    return found < 0 ? room : found;
}

// The k values of largest magnitude, with their indices in ascending order; of equal ones the first. `candidates` has room for
// `room` indices, more than k + 16: a sample gives the threshold for candidates.
void topk_encode(const float *x, i64 n, i64 k, int32_t *candidates, i64 room, int32_t *places, float *values) {
    if (k == 0) return;
    std::vector<uint32_t> sample;
    i64 stride = std::max<i64>(1, n / 32768);
    for (i64 i = stride / 2; i < n; i += stride) sample.push_back(magnitude(x[i]));
    double share = 1.15 * (double)k / (double)n + 3.0 * std::sqrt((double)k / (double)n / (double)sample.size());
    i64 found = -1;
    uint32_t least = 0;
    for (int attempt = 0; attempt < 12; attempt++) {
        i64 rank = std::min<i64>((i64)sample.size() - 1, (i64)(share * (double)sample.size()));
        bool everything = share >= 1.0;
        std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<uint32_t>());
        least = everything ? 0 : sample[rank];
        found = places_of(x, n, least, candidates, room);
        if (found >= k || (found < 0 && everything)) break;
        share *= found < 0 ? 0.8 : 2.0;
    }
    std::vector<int32_t> all;
    if (found < k) {  // a sample says nothing about this gradient, as where nearly all of it is zero
        all.resize(n);
        found = places_of(x, n, 0, all.data(), n);
        candidates = all.data();
    }
    std::vector<uint32_t> sizes(found);
    for (i64 i = 0; i < found; i++) sizes[i] = magnitude(x[candidates[i]]);
    if (found > k) {
        std::vector<uint32_t> order(sizes);
        std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<uint32_t>());
        uint32_t bar = order[k - 1];
        i64 above = 0;
        for (i64 i = 0; i < found; i++) above += sizes[i] > bar;
        i64 equal = k - above, kept = 0;
        for (i64 i = 0; i < found; i++)
            if (sizes[i] > bar || (sizes[i] == bar && equal-- > 0)) places[kept++] = candidates[i];
    } else {
        std::copy(candidates, candidates + k, places);
    }
    for (i64 i = 0; i < k; i++) values[i] = x[places[i]];
}

// Adds values at their indices. Indices come from the wire: if one is outside of the n values, nothing is written and the
// result is 0. A negative index is large as an unsigned number.
int sparse_add(const int32_t *places, const float *values, i64 k, float *out, i64 n) {
    uint32_t most = 0;
    for (i64 i = 0; i < k; i++) most = std::max(most, (uint32_t)places[i]);
    if (k && (most > INT32_MAX || most >= n)) return 0;
    for (i64 i = 0; i < k; i++) out[places[i]] += values[i];
    return 1;
}

}  // extern "C"
