// XXH3 with 64 bits and seed 0, of more than 240 bytes, made of what a copy has in registers anyway. Of processors
// whose least byte comes first, as all that Baton runs on.
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton::xxh3 {

constexpr int64_t SHORT_BYTES = 240;  // so many bytes and fewer have algorithms of their own
constexpr int64_t STRIPE = 64, STRIPES = 16, BLOCK = STRIPES * STRIPE;
constexpr int64_t AHEAD = 16 * STRIPE, PAGE = 4096;
constexpr uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
                   PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, PRIME_MX1 = 0x165667919E3779F9;
constexpr uint64_t START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

constexpr int SCRAMBLE_AT = 128, LAST_AT = 121, MERGE_AT = 11;  // bytes of SECRET
constexpr unsigned char SECRET[192] = {
    0xB8, 0xFE, 0x6C, 0x39, 0x23, 0xA4, 0x4B, 0xBE, 0x7C, 0x01, 0x81, 0x2C, 0xF7, 0x21, 0xAD, 0x1C,
    0xDE, 0xD4, 0x6D, 0xE9, 0x83, 0x90, 0x97, 0xDB, 0x72, 0x40, 0xA4, 0xA4, 0xB7, 0xB3, 0x67, 0x1F,
    0xCB, 0x79, 0xE6, 0x4E, 0xCC, 0xC0, 0xE5, 0x78, 0x82, 0x5A, 0xD0, 0x7D, 0xCC, 0xFF, 0x72, 0x21,
    0xB8, 0x08, 0x46, 0x74, 0xF7, 0x43, 0x24, 0x8E, 0xE0, 0x35, 0x90, 0xE6, 0x81, 0x3A, 0x26, 0x4C,
    0x3C, 0x28, 0x52, 0xBB, 0x91, 0xC3, 0x00, 0xCB, 0x88, 0xD0, 0x65, 0x8B, 0x1B, 0x53, 0x2E, 0xA3,
    0x71, 0x64, 0x48, 0x97, 0xA2, 0x0D, 0xF9, 0x4E, 0x38, 0x19, 0xEF, 0x46, 0xA9, 0xDE, 0xAC, 0xD8,
    0xA8, 0xFA, 0x76, 0x3F, 0xE3, 0x9C, 0x34, 0x3F, 0xF9, 0xDC, 0xBB, 0xC7, 0xC7, 0x0B, 0x4F, 0x1D,
    0x8A, 0x51, 0xE0, 0x4B, 0xCD, 0xB4, 0x59, 0x31, 0xC8, 0x9F, 0x7E, 0xC9, 0xD9, 0x78, 0x73, 0x64,
    0xEA, 0xC5, 0xAC, 0x83, 0x34, 0xD3, 0xEB, 0xC3, 0xC5, 0x81, 0xA0, 0xFF, 0xFA, 0x13, 0x63, 0xEB,
    0x17, 0x0D, 0xDD, 0x51, 0xB7, 0xF0, 0xDA, 0x49, 0xD3, 0x16, 0x55, 0x26, 0x29, 0xD4, 0x68, 0x9E,
    0x2B, 0x16, 0xBE, 0x58, 0x7D, 0x47, 0xA1, 0xFC, 0x8F, 0xF8, 0xB8, 0xD1, 0x7A, 0xD0, 0x31, 0xCE,
    0x45, 0xCB, 0x3A, 0x8F, 0x95, 0x16, 0x04, 0x28, 0xAF, 0xD7, 0xFB, 0xCA, 0xBB, 0x4B, 0x40, 0x7E,
};

#if defined(__AVX512F__)
using Lanes = __m512i;
inline Lanes load(const void* from) { return _mm512_loadu_si512(from); }
inline void store(void* to, Lanes a) { _mm512_storeu_si512(to, a); }
inline void stream(void* to, Lanes a) { _mm512_stream_si512(static_cast<Lanes*>(to), a); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_epi64(a, b); }
inline Lanes exclusive_or(Lanes a, Lanes b) { return _mm512_xor_si512(a, b); }
inline Lanes low_product(Lanes a, Lanes b) { return _mm512_mul_epu32(a, b); }
inline Lanes repeat(uint64_t a) { return _mm512_set1_epi64(static_cast<int64_t>(a)); }
template <int BITS>
Lanes shift_right(Lanes a) {
    return _mm512_srli_epi64(a, BITS);
}
template <int BITS>
Lanes shift_left(Lanes a) {
    return _mm512_slli_epi64(a, BITS);
}
inline Lanes swap_pairs(Lanes a) { return _mm512_shuffle_epi32(a, _MM_PERM_BADC); }
#elif defined(__AVX2__)
using Lanes = __m256i;
inline Lanes load(const void* from) { return _mm256_loadu_si256(static_cast<const Lanes*>(from)); }
inline void store(void* to, Lanes a) { _mm256_storeu_si256(static_cast<Lanes*>(to), a); }
inline void stream(void* to, Lanes a) { _mm256_stream_si256(static_cast<Lanes*>(to), a); }
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_epi64(a, b); }
inline Lanes exclusive_or(Lanes a, Lanes b) { return _mm256_xor_si256(a, b); }
inline Lanes low_product(Lanes a, Lanes b) { return _mm256_mul_epu32(a, b); }
inline Lanes repeat(uint64_t a) { return _mm256_set1_epi64x(static_cast<int64_t>(a)); }
template <int BITS>
Lanes shift_right(Lanes a) {
    return _mm256_srli_epi64(a, BITS);
}
template <int BITS>
Lanes shift_left(Lanes a) {
    return _mm256_slli_epi64(a, BITS);
}
inline Lanes swap_pairs(Lanes a) { return _mm256_shuffle_epi32(a, 0x4E); }
#else
struct Lanes {
    uint64_t low, high;
};
inline Lanes load(const void* from) {
    Lanes a;
    std::memcpy(&a, from, sizeof a);
    return a;
}
inline void store(void* to, Lanes a) { std::memcpy(to, &a, sizeof a); }
inline void stream(void* to, Lanes a) { store(to, a); }
inline Lanes add(Lanes a, Lanes b) { return {a.low + b.low, a.high + b.high}; }
inline Lanes exclusive_or(Lanes a, Lanes b) { return {a.low ^ b.low, a.high ^ b.high}; }
inline uint64_t low_half(uint64_t a) { return a & 0xFFFFFFFF; }
inline Lanes low_product(Lanes a, Lanes b) {
    return {low_half(a.low) * low_half(b.low), low_half(a.high) * low_half(b.high)};
}
inline Lanes repeat(uint64_t a) { return {a, a}; }
template <int BITS>
Lanes shift_right(Lanes a) {
    return {a.low >> BITS, a.high >> BITS};
}
template <int BITS>
Lanes shift_left(Lanes a) {
    return {a.low << BITS, a.high << BITS};
}
inline Lanes swap_pairs(Lanes a) { return {a.high, a.low}; }
#endif

inline void prefetch(const void* at) {
#if defined(__x86_64__)
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
#endif
}

// Where the next page of `to` lies is looked up before it is needed, which takes long where pages are small, and longer
// on a virtual machine; reads ahead do it for `from`. Each time another line, since those of one place in a page share
// a set of the cache.
inline void look_ahead(const char* to, int64_t at) { prefetch(to + at + PAGE + at / PAGE * STRIPE % PAGE); }

enum class Put { NOWHERE, STORED, STREAMED };

constexpr int PARTS = STRIPE / sizeof(Lanes);

struct Sums {
    Lanes part[PARTS];
};

// One stripe: 64 bytes go from `from` to `to`, and into the sums.
template <Put PUT>
inline void take(Sums& sums, char* to, const char* from, const unsigned char* secret) {
    for (int p = 0; p < PARTS; ++p) {
        const int64_t at = p * static_cast<int64_t>(sizeof(Lanes));
        const Lanes data = load(from + at);
        if constexpr (PUT == Put::STORED) store(to + at, data);
        if constexpr (PUT == Put::STREAMED) stream(to + at, data);
        const Lanes keyed = exclusive_or(data, load(secret + at));
        const Lanes product = low_product(keyed, shift_right<32>(keyed));
        sums.part[p] = add(sums.part[p], add(product, swap_pairs(data)));
    }
}

inline void scramble(Sums& sums) {
    const Lanes prime = repeat(PRIME32_1);
    for (int p = 0; p < PARTS; ++p) {
        const Lanes mixed = exclusive_or(sums.part[p], shift_right<47>(sums.part[p]));
        const Lanes keyed = exclusive_or(mixed, load(SECRET + SCRAMBLE_AT + p * sizeof(Lanes)));
        const Lanes high = low_product(shift_right<32>(keyed), prime);
        sums.part[p] = add(low_product(keyed, prime), shift_left<32>(high));
    }
}

inline uint64_t word_at(const unsigned char* from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

inline uint64_t folded_product(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t merged(const Sums& sums, int64_t bytes) {
    uint64_t words[8], result = static_cast<uint64_t>(bytes) * PRIME64_1;
    std::memcpy(words, &sums, sizeof words);
    for (int i = 0; i < 8; i += 2)
        result += folded_product(words[i] ^ word_at(SECRET + MERGE_AT + 8 * i),
                                 words[i + 1] ^ word_at(SECRET + MERGE_AT + 8 * (i + 1)));
    result = (result ^ (result >> 37)) * PRIME_MX1;
    return result ^ (result >> 32);
}

// Copies and returns the checksum of what it wrote. The two ranges must not overlap. `to` of a streamed copy lies on
// a multiple of sizeof(Lanes); bytes > SHORT_BYTES.
template <Put PUT>
uint64_t copy(char* to, const char* from, int64_t bytes) {
    Sums sums;
    std::memcpy(&sums, START, sizeof sums);
    const int64_t whole = (bytes - 1) / BLOCK * BLOCK, stripes = (bytes - 1 - whole) / STRIPE;
    int64_t at = 0;
    while (at < whole) {
        if (at % PAGE == 0) look_ahead(to, at);
        for (int64_t i = 0; i < STRIPES; ++i, at += STRIPE) {
            prefetch(from + at + AHEAD);
            take<PUT>(sums, to + at, from + at, SECRET + 8 * i);
        }
        scramble(sums);
    }
    for (int64_t i = 0; i < stripes; ++i, at += STRIPE) take<PUT>(sums, to + at, from + at, SECRET + 8 * i);
    std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
    // The last stripe ends with the last byte, and may lie over what the one before it took. It is read where the
    // bytes arrived, so that the checksum is of them even if others write to `from`.
    take<Put::NOWHERE>(sums, nullptr, to + bytes - STRIPE, SECRET + LAST_AT);
    return merged(sums, bytes);
}

}  // namespace baton::xxh3
