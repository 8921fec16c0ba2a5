/* Moves a chunk's payload and checks it in one pass: what goes to the destination is what was hashed, from the same
 * registers. Copying with write-combining stores spares the read of every destination line that a plain copy costs.
 *
 * The checksum is XXH3-64 as its specification defines it for inputs of more than 240 bytes (seed 0, default secret;
 * github.com/Cyan4973/xxHash, doc/xxhash_spec.md), so that the xxhash library, used where this is not built, agrees.
 * No Python here: the shared object is loaded with ctypes, which lets go of the interpreter's lock while it runs.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only little-endian processors"
#endif

enum { STRIPE = 64, BLOCK = 1024, STRIPES = BLOCK / STRIPE, SECRET = 192 };

/* Below this the destination is likely to be read while it is still in a cache: plain stores leave it there. */
static const uint64_t STREAM_BYTES = 128 << 10;

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                      P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* A checksum under way. `fill` bytes of the input's current block lie in `block`; the last block always stays there,
 * full or not, because it ends differently. `tail` holds the last stripe of the block before. */
struct polarkv_hash {
    uint64_t acc[8];
    uint64_t total_bytes, done_bytes, fill;
    uint8_t block[BLOCK];
    uint8_t tail[STRIPE];
};

struct polarkv_run { /* a struct iovec */
    uint8_t *base;
    uint64_t size_bytes;
};

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline void accumulate(uint64_t *acc, const uint8_t *stripe, const uint8_t *key) {
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = read64(stripe + 8 * lane), mixed = value ^ read64(key + 8 * lane);
        acc[lane ^ 1] += value;
        acc[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
}

static inline void scramble(uint64_t *acc) {
    for (int lane = 0; lane < 8; lane++)
        acc[lane] = (acc[lane] ^ (acc[lane] >> 47) ^ read64(secret + SECRET - STRIPE + 8 * lane)) * P32_1;
}

/* Blocks: `count` of them from `from` into `hash`, and to `to` unless it is NULL. */
typedef void move_blocks(struct polarkv_hash *hash, uint8_t *to, const uint8_t *from, uint64_t count, int stream);

static void move_blocks_plain(struct polarkv_hash *hash, uint8_t *to, const uint8_t *from, uint64_t count, int stream) {
    (void)stream;
    for (; count; count--, from += BLOCK) {
        uint8_t held[BLOCK]; /* the source may change between two looks */
        memcpy(held, from, BLOCK);
        if (to) {
            memcpy(to, held, BLOCK);
            to += BLOCK;
        }
        for (int stripe = 0; stripe < STRIPES; stripe++)
            accumulate(hash->acc, held + stripe * STRIPE, secret + 8 * stripe);
        scramble(hash->acc);
        memcpy(hash->tail, held + BLOCK - STRIPE, STRIPE);
    }
}

#if defined(__x86_64__)
enum store { NONE, PLAIN, STREAM16, STREAM32 };

#define AVX2 __attribute__((target("avx2")))

AVX2 static inline __m256i mix(__m256i acc, __m256i value, __m256i key) {
    __m256i mixed = _mm256_xor_si256(value, key);
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
}

AVX2 static inline void store(uint8_t *to, __m256i value, enum store how) {
    if (how == STREAM32) {
        _mm256_stream_si256((__m256i *)to, value);
    } else if (how == STREAM16) {
        _mm_stream_si128((__m128i *)to, _mm256_castsi256_si128(value));
        _mm_stream_si128((__m128i *)(to + 16), _mm256_extracti128_si256(value, 1));
    } else if (how == PLAIN) {
        _mm256_storeu_si256((__m256i *)to, value);
    }
}

AVX2 static inline __m256i scramble_half(__m256i acc, const uint8_t *key) {
    const __m256i prime = _mm256_set1_epi32((int)0x9E3779B1);
    acc = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    acc = _mm256_xor_si256(acc, _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

AVX2 static inline __attribute__((always_inline)) void move_blocks_as(
    struct polarkv_hash *hash, uint8_t *to, const uint8_t *from, uint64_t count, enum store how) {
    __m256i low = _mm256_loadu_si256((const __m256i *)hash->acc);
    __m256i high = _mm256_loadu_si256((const __m256i *)(hash->acc + 4));
    __m256i first = _mm256_setzero_si256(), second = first;
    for (; count; count--) {
#pragma GCC unroll 16
        for (int stripe = 0; stripe < STRIPES; stripe++, from += STRIPE) {
            _mm_prefetch((const char *)from + 4096, _MM_HINT_NTA);
            first = _mm256_loadu_si256((const __m256i *)from);
            second = _mm256_loadu_si256((const __m256i *)(from + 32));
            store(to, first, how);
            store(to + 32, second, how);
            low = mix(low, first, _mm256_loadu_si256((const __m256i *)(secret + 8 * stripe)));
            high = mix(high, second, _mm256_loadu_si256((const __m256i *)(secret + 8 * stripe + 32)));
            if (how != NONE)
                to += STRIPE;
        }
        low = scramble_half(low, secret + SECRET - STRIPE);
        high = scramble_half(high, secret + SECRET - STRIPE + 32);
    }
    _mm256_storeu_si256((__m256i *)hash->acc, low);
    _mm256_storeu_si256((__m256i *)(hash->acc + 4), high);
    _mm256_storeu_si256((__m256i *)hash->tail, first);
    _mm256_storeu_si256((__m256i *)(hash->tail + 32), second);
}

AVX2 static void move_blocks_avx2(struct polarkv_hash *hash, uint8_t *to, const uint8_t *from, uint64_t count, int stream) {
    if (!to) {
        move_blocks_as(hash, to, from, count, NONE);
    } else if (stream && !((uintptr_t)to & 31)) {
        move_blocks_as(hash, to, from, count, STREAM32);
    } else if (stream && !((uintptr_t)to & 15)) {
        move_blocks_as(hash, to, from, count, STREAM16);
    } else {
        move_blocks_as(hash, to, from, count, PLAIN);
    }
}
#endif

static move_blocks *choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        return move_blocks_avx2;
#endif
    return move_blocks_plain;
}

static uint64_t least(uint64_t one, uint64_t other) { return one < other ? one : other; }

static void move_run(struct polarkv_hash *hash, move_blocks *blocks, uint8_t *to, const uint8_t *from, uint64_t left,
                     int stream) {
    while (left) {
        uint64_t size, later = hash->total_bytes - hash->done_bytes - hash->fill; /* bytes to come, these included */
        if (!hash->fill && left >= BLOCK && later > BLOCK) {
            uint64_t count = least(left, later - 1) / BLOCK;
            size = count * BLOCK;
            blocks(hash, to, from, count, stream);
            hash->done_bytes += size;
        } else {
            uint8_t *held = hash->block + hash->fill;
            size = least(BLOCK - hash->fill, left);
            memcpy(held, from, size);
            if (to)
                memcpy(to, held, size);
            hash->fill += size;
            if (hash->fill == BLOCK && later > size) {
                blocks(hash, NULL, hash->block, 1, 0);
                hash->done_bytes += BLOCK;
                hash->fill = 0;
            }
        }
        if (to)
            to += size;
        from += size;
        left -= size;
    }
}

/* Changes with the meaning of any function here: a library left over from other sources is not used. */
int polarkv_move_version(void) { return 2; }

size_t polarkv_hash_bytes(void) { return sizeof(struct polarkv_hash); }

/* Begin the checksum of an input of `total_bytes` (more than 240). */
void polarkv_hash_start(struct polarkv_hash *hash, uint64_t total_bytes) {
    const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memset(hash, 0, sizeof *hash);
    memcpy(hash->acc, start, sizeof start);
    hash->total_bytes = total_bytes;
}

/* Write-combining stores are not kept in order with others: without fences a slot's header could be seen to change
 * before or after the wrong part of its payload. */
static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* The next bytes of the input lie in `runs`: hash them, and copy them one after the other to `to` unless it is NULL. */
void polarkv_gather(struct polarkv_hash *hash, uint8_t *to, const struct polarkv_run *runs, size_t count) {
    move_blocks *blocks = choose();
    int stream = hash->total_bytes >= STREAM_BYTES;
    fence();
    for (; count; count--, runs++) {
        move_run(hash, blocks, to, runs->base, runs->size_bytes, stream);
        if (to)
            to += runs->size_bytes;
    }
    fence();
}

/* The next bytes of the input lie at `from`: hash them, and copy them into `runs`. */
void polarkv_scatter(struct polarkv_hash *hash, const struct polarkv_run *runs, size_t count, const uint8_t *from) {
    move_blocks *blocks = choose();
    int stream = hash->total_bytes >= STREAM_BYTES;
    fence();
    for (; count; count--, runs++) {
        move_run(hash, blocks, runs->base, from, runs->size_bytes, stream);
        from += runs->size_bytes;
    }
    fence();
}

/* The checksum, once all of the input was given. */
uint64_t polarkv_hash_finish(const struct polarkv_hash *hash) {
    uint64_t acc[8], result = hash->total_bytes * P64_1;
    uint8_t last[STRIPE];
    memcpy(acc, hash->acc, sizeof acc);
    for (uint64_t stripe = 0; stripe < (hash->fill - 1) / STRIPE; stripe++)
        accumulate(acc, hash->block + stripe * STRIPE, secret + 8 * stripe);
    uint64_t fresh = least(hash->fill, STRIPE);
    memcpy(last, hash->tail + fresh, STRIPE - fresh);
    memcpy(last + STRIPE - fresh, hash->block + hash->fill - fresh, fresh);
    accumulate(acc, last, secret + SECRET - STRIPE - 7);
    for (int pair = 0; pair < 4; pair++) {
        __uint128_t product = (__uint128_t)(acc[2 * pair] ^ read64(secret + 11 + 16 * pair)) *
                              (acc[2 * pair + 1] ^ read64(secret + 11 + 16 * pair + 8));
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result = (result ^ (result >> 37)) * 0x165667919E3779F9;
    return result ^ (result >> 32);
}

/* Several whole payloads in one call, each of more than 240 bytes. The runs of all lie one after the other in `runs`. */
struct polarkv_payload {
    uint8_t *at; /* in the slot */
    uint64_t size_bytes, runs, checksum;
};

void polarkv_gather_all(struct polarkv_payload *payloads, size_t count, const struct polarkv_run *runs) {
    for (struct polarkv_payload *one = payloads; one < payloads + count; runs += one++->runs) {
        struct polarkv_hash hash;
        polarkv_hash_start(&hash, one->size_bytes);
        polarkv_gather(&hash, one->at, runs, one->runs);
        one->checksum = polarkv_hash_finish(&hash);
    }
}

void polarkv_scatter_all(struct polarkv_payload *payloads, size_t count, const struct polarkv_run *runs) {
    for (struct polarkv_payload *one = payloads; one < payloads + count; runs += one++->runs) {
        struct polarkv_hash hash;
        polarkv_hash_start(&hash, one->size_bytes);
        polarkv_scatter(&hash, runs, one->runs, one->at);
        one->checksum = polarkv_hash_finish(&hash);
    }
}
