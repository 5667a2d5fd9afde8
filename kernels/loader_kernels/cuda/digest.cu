// Block hashes of slice digest v1 (see digest.py): XXH3-64, seed 0, of each 16 KiB of a span.
//
// XXH3 is specified at https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. Of a long input
// the sums inside one round of 1024 bytes do not depend on each other, only the scrambling between
// rounds does. So a warp takes one block: each lane adds up half a stripe (32 bytes) of every round,
// five exchanges give each lane the whole sum of one accumulator, and all lanes scramble theirs.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Span {
    u64 address;
    u64 length;
    u64 first_block;  // number of the span's first block among all blocks of the call
};

static const u64 BLOCK_BYTES = 16 << 10;
static const u64 ROUND_BYTES = 1024;
static const u64 STRIPE_BYTES = 64;
static const u64 MEDIUM_BYTES = 240;
static const u32 ALL = 0xffffffffu;

static const u64 P32_1 = 0x9E3779B1ull, P32_2 = 0x85EBCA77ull, P32_3 = 0xC2B2AE3Dull;
static const u64 P64_1 = 0x9E3779B185EBCA87ull, P64_2 = 0xC2B2AE3D27D4EB4Full,
                 P64_3 = 0x165667B19E3779F9ull, P64_4 = 0x85EBCA77C2B2AE63ull,
                 P64_5 = 0x27D4EB2F165667C5ull;
static const u64 MX_1 = 0x165667919E3779F9ull, MX_2 = 0x9FB21C651E98DF25ull;

__constant__ __align__(8) u8 SECRET[192] = {
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

// Little-endian words from any address; the compiler may not assume alignment.
__device__ __forceinline__ u64 read64(const u8* p) {
    u64 value = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) value |= (u64)p[i] << (8 * i);
    return value;
}

__device__ __forceinline__ u32 read32(const u8* p) {
    return (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}

// Words from global memory by the widest load that the address allows.
__device__ __forceinline__ u64 load64(const u8* p) {
    u64 address = (u64)p;
    if (address % 8 == 0) return *(const u64*)p;
    if (address % 4 == 0) return (u64)((const u32*)p)[0] | (u64)((const u32*)p)[1] << 32;
    if (address % 2 == 0) {
        const unsigned short* q = (const unsigned short*)p;
        return (u64)q[0] | (u64)q[1] << 16 | (u64)q[2] << 32 | (u64)q[3] << 48;
    }
    return read64(p);
}

__device__ __forceinline__ u64 secret64(int offset) { return read64(SECRET + offset); }

__device__ __forceinline__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 rotate(u64 x, int bits) { return x << bits | x >> (64 - bits); }

__device__ __forceinline__ u64 avalanche(u64 x) {
    x ^= x >> 37;
    x *= MX_1;
    return x ^ x >> 32;
}

__device__ __forceinline__ u64 avalanche64(u64 x) {
    x ^= x >> 33;
    x *= P64_2;
    x ^= x >> 29;
    x *= P64_3;
    return x ^ x >> 32;
}

__device__ u64 mix(const u8* p, int offset) {
    return fold(read64(p) ^ secret64(offset), read64(p + 8) ^ secret64(offset + 8));
}

__device__ u64 swap64(u64 x) {
    u32 low = (u32)x, high = (u32)(x >> 32);
    return (u64)__byte_perm(low, 0, 0x0123) << 32 | __byte_perm(high, 0, 0x0123);
}

// Inputs of 1 to 240 bytes, by one thread.
__device__ u64 hash_short(const u8* p, u64 n) {
    if (n <= 3) {
        u32 combined = (u32)p[n - 1] | (u32)n << 8 | (u32)p[0] << 16 | (u32)p[n >> 1] << 24;
        return avalanche64((u64)(read32(SECRET) ^ read32(SECRET + 4)) ^ combined);
    }
    if (n <= 8) {
        u64 value = (secret64(8) ^ secret64(16)) ^ ((u64)read32(p + n - 4) | (u64)read32(p) << 32);
        value ^= rotate(value, 49) ^ rotate(value, 24);
        value *= MX_2;
        value ^= (value >> 35) + n;
        value *= MX_2;
        return value ^ value >> 28;
    }
    if (n <= 16) {
        u64 low = (secret64(24) ^ secret64(32)) ^ read64(p);
        u64 high = (secret64(40) ^ secret64(48)) ^ read64(p + n - 8);
        return avalanche(n + swap64(low) + high + fold(low, high));
    }
    u64 sum = n * P64_1;
    if (n <= 128) {
        for (int i = (int)((n - 1) >> 5); i >= 0; --i) {
            sum += mix(p + i * 16, i * 32);
            sum += mix(p + n - i * 16 - 16, i * 32 + 16);
        }
        return avalanche(sum);
    }
    for (int i = 0; i < 8; ++i) sum += mix(p + i * 16, i * 16);
    sum = avalanche(sum);
    for (int i = 8; i < (int)(n >> 4); ++i) sum += mix(p + i * 16, (i - 8) * 16 + 3);
    sum += mix(p + n - 16, 119);
    return avalanche(sum);
}

__device__ __forceinline__ u64 product(u64 value) { return (value & 0xffffffffull) * (value >> 32); }

// Inputs of more than 240 bytes, by a whole warp; every lane returns the hash.
__device__ u64 hash_long(const u8* p, u64 n, u32 lane) {
    const u32 stripe = lane >> 1, half = lane & 1;
    const bool second = lane & 2, odd = lane & 4;
    // The accumulator whose sums this lane ends up with; four lanes have the same.
    const u32 mine = 4 * half + 2 * (second ? 1 : 0) + (odd ? 1 : 0);
    const u64 initial[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    u64 acc = initial[mine];
    u64 key[4];
    for (int j = 0; j < 4; ++j) key[j] = secret64(8 * (stripe + 4 * half + j));
    const u64 scramble = secret64(128 + 8 * mine);
    const u64 last_round = (n - 1) / ROUND_BYTES;
    const u64 last_stripes = (n - 1 - last_round * ROUND_BYTES) / STRIPE_BYTES;
    const bool aligned = (u64)p % 16 == 0;

    for (u64 round = 0; round <= last_round; ++round) {
        u64 data[4] = {0, 0, 0, 0};
        const bool has = round < last_round || stripe < last_stripes;
        const u8* q = p + round * ROUND_BYTES + lane * 32;
        if (has) {
            if (aligned) {
                ulonglong2 a = ((const ulonglong2*)q)[0], b = ((const ulonglong2*)q)[1];
                data[0] = a.x, data[1] = a.y, data[2] = b.x, data[3] = b.y;
            } else {
                for (int j = 0; j < 4; ++j) data[j] = load64(q + 8 * j);
            }
        }
        u64 sum[4];
        for (int j = 0; j < 4; ++j) sum[j] = has ? product(data[j] ^ key[j]) + data[j ^ 1] : 0;
        u64 keep0 = second ? sum[2] : sum[0], keep1 = second ? sum[3] : sum[1];
        keep0 += __shfl_xor_sync(ALL, second ? sum[0] : sum[2], 2);
        keep1 += __shfl_xor_sync(ALL, second ? sum[1] : sum[3], 2);
        u64 total = odd ? keep1 : keep0;
        total += __shfl_xor_sync(ALL, odd ? keep0 : keep1, 4);
        total += __shfl_xor_sync(ALL, total, 8);
        total += __shfl_xor_sync(ALL, total, 16);
        acc += total;
        if (round < last_round) acc = (acc ^ acc >> 47 ^ scramble) * P32_1;
    }
    const u8* end = p + n - STRIPE_BYTES;
    acc += product(load64(end + 8 * mine) ^ secret64(121 + 8 * mine)) + load64(end + 8 * (mine ^ 1));

    u64 result = n * P64_1;
    for (u32 i = 0; i < 8; i += 2) {
        u32 from = (i >> 2) | (i >> 1 & 1) << 1;
        u64 even = __shfl_sync(ALL, acc, from), next = __shfl_sync(ALL, acc, from | 4);
        result += fold(even ^ secret64(11 + 8 * i), next ^ secret64(19 + 8 * i));
    }
    return avalanche(result);
}

// One warp a block. `spans` are ordered by first_block and none is empty.
extern "C" __global__ void hash_blocks(const Span* spans, u32 span_count, u64 block_count, u64* hashes) {
    const u64 block = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const u32 lane = threadIdx.x % 32;
    if (block >= block_count) return;
    u32 low = 0, high = span_count;  // the span is in [low, high)
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (spans[middle].first_block <= block) low = middle; else high = middle;
    }
    const Span span = spans[low];
    const u64 offset = (block - span.first_block) * BLOCK_BYTES;
    const u64 left = span.length - offset, n = left < BLOCK_BYTES ? left : BLOCK_BYTES;
    const u8* p = (const u8*)span.address + offset;
    u64 hash = 0;
    if (n > MEDIUM_BYTES) hash = hash_long(p, n, lane);
    else if (lane == 0) hash = hash_short(p, n);
    if (lane == 0) hashes[block] = hash;
}
