// Many copies inside a device by one launch.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Copy {
    u64 source;
    u64 target;
    u64 length;
    u64 first_tile;  // number of the copy's first tile among all tiles of the call
};

static const u64 TILE_BYTES = 64 << 10;

template <typename Word>
__device__ void copy_words(u64 source, u64 target, u64 length) {
    const u64 count = length / sizeof(Word);
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) ((Word*)target)[i] = ((const Word*)source)[i];
    for (u64 i = count * sizeof(Word) + threadIdx.x; i < length; i += blockDim.x)
        ((char*)target)[i] = ((const char*)source)[i];
}

// One thread block a tile. `copies` are ordered by first_tile, none is empty, and none overlaps another.
extern "C" __global__ void copy_spans(const Copy* copies, u32 count) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (copies[middle].first_tile <= blockIdx.x) low = middle; else high = middle;
    }
    const Copy copy = copies[low];
    const u64 offset = (blockIdx.x - copy.first_tile) * TILE_BYTES;
    const u64 left = copy.length - offset, length = left < TILE_BYTES ? left : TILE_BYTES;
    const u64 source = copy.source + offset, target = copy.target + offset;
    const u64 alignment = source | target;
    if (alignment % 16 == 0) copy_words<ulonglong2>(source, target, length);
    else if (alignment % 8 == 0) copy_words<u64>(source, target, length);
    else if (alignment % 4 == 0) copy_words<u32>(source, target, length);
    else if (alignment % 2 == 0) copy_words<unsigned short>(source, target, length);
    else copy_words<char>(source, target, length);
}
