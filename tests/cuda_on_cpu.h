// As much of CUDA C++ as our kernels use, on the CPU: one thread of the machine for each thread of a
// warp, so that the very kernels can be checked where there is no GPU.
#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __align__(n) alignas(n)

struct Dimension { unsigned x; };
struct ulonglong2 { unsigned long long x, y; };
static thread_local Dimension threadIdx, blockIdx, blockDim;
static std::barrier<>* warp;
static unsigned long long lanes[32];

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
static inline unsigned long long exchange(unsigned long long value, unsigned from) {
    lanes[threadIdx.x % 32] = value;
    warp->arrive_and_wait();
    unsigned long long result = lanes[from];
    warp->arrive_and_wait();
    return result;
}
static inline unsigned long long __shfl_sync(unsigned, unsigned long long value, unsigned from) {
    return exchange(value, from);
}
static inline unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, unsigned mask) {
    return exchange(value, threadIdx.x % 32 ^ mask);
}

// Runs `kernel` for `blocks` thread blocks of one warp each, one block after another.
template <typename Kernel>
void launch(unsigned blocks, Kernel kernel) {
    std::barrier<> barrier(32);
    warp = &barrier;
    std::vector<std::thread> threads;
    for (unsigned lane = 0; lane < 32; ++lane)
        threads.emplace_back([=] {
            threadIdx.x = lane, blockDim.x = 32;
            for (unsigned block = 0; block < blocks; ++block) {
                blockIdx.x = block;
                kernel();
                warp->arrive_and_wait();
            }
        });
    for (auto& thread : threads) thread.join();
}
