// Exact top-k of each row of fp32 scores by radix selection; equal scores go to the lower index (for bits: the higher).
// One block a row. A 54-bit key (score, then index) is narrowed 11 bits at a time by shared histograms until
// what is left fits into shared memory; -inf and entries outside `allowed` are never taken. Output: ascending indices
// with -1 behind them, or one bit per index.
#define THREADS 512
#define WARPS (THREADS / 32)
#define BINS 2048
#define CAPACITY 2560
#define INDEX_BITS 22
#define MAX_K 2048

typedef unsigned long long u64;
typedef unsigned int u32;

__device__ __forceinline__ int digit_shift(int done) {  // bits below the digits done so far
    const int shift[6] = {54, 43, 32, 22, 11, 0};
    return shift[done];
}

#define INDEX_MASK ((1u << INDEX_BITS) - 1u)

struct Row {
    const float* scores;
    const u32* allowed;
    int block_shift;
    u32 flip;  // INDEX_MASK: the lower of equal scores wins, 0: the higher
    __device__ __forceinline__ bool take(int i, u64& key) const {
        if (allowed != nullptr) {
            int block = i >> block_shift;
            if (!(allowed[block >> 5] >> (block & 31) & 1u)) return false;
        }
        float score = scores[i];
        if (score == __uint_as_float(0xff800000u)) return false;
        u32 order = __float_as_uint(score + 0.0f);  // -0 and 0 are equal
        order = order & 0x80000000u ? ~order : order | 0x80000000u;
        key = ((u64)order << INDEX_BITS) | (u64)((u32)i ^ flip);
        return true;
    }
    __device__ __forceinline__ int index_of(u64 key) const { return (int)(((u32)key & INDEX_MASK) ^ flip); }
};

struct Choice {  // the bin that the k-th key falls into
    int bin, above, inside, total;
};

// Largest-first scan of the histogram: the bin where the running count reaches `need`.
__device__ void choose(const int* histogram, int need, int* partial, Choice* choice) {
    const int each = BINS / THREADS;
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int top = BINS - 1 - tid * each, sum = 0;
    for (int j = 0; j < each; ++j) sum += histogram[top - j];
    int running = sum;
    for (int d = 1; d < 32; d <<= 1) {
        int other = __shfl_up_sync(0xffffffffu, running, d);
        if (lane >= d) running += other;
    }
    if (lane == 31) partial[warp] = running;
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += partial[w];
        total += partial[w];
    }
    running += before;
    if (tid == 0) choice->total = total;
    int above = running - sum;
    if (above < need && need <= running) {
        for (int j = 0; j < each; ++j) {
            int count = histogram[top - j];
            if (above + count >= need) {
                choice->bin = top - j;
                choice->above = above;
                choice->inside = count;
                break;
            }
            above += count;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
select_topk(const float* scores, int stride, const long long* lengths, const u32* allowed, int allowed_words,
            int block_shift, long long* indices, u32* bits, int bit_words, int k) {
    __shared__ int histogram[BINS];
    __shared__ u64 buffer[CAPACITY];
    __shared__ int chosen[MAX_K];
    __shared__ int partial[WARPS];
    __shared__ Choice choice;
    __shared__ int chosen_count, buffered;
    const int row = blockIdx.x, tid = threadIdx.x;
    const int n = (int)lengths[row];
    Row source;
    source.scores = scores + (long long)row * stride;
    source.allowed = allowed_words ? allowed + (long long)row * allowed_words : nullptr;
    source.block_shift = block_shift;
    source.flip = bit_words ? 0u : INDEX_MASK;
    if (tid == 0) { chosen_count = 0; buffered = 0; }

    int need = k, done = 0, inside = n;
    u64 prefix = 0;
    bool all = false;  // everything at or above `prefix` is wanted
    while (!all && done < 5 && (done == 0 || inside > CAPACITY)) {
        int high = digit_shift(done), low = digit_shift(done + 1);
        for (int b = tid; b < BINS; b += THREADS) histogram[b] = 0;
        __syncthreads();
        u64 key;
        for (int i = tid; i < n; i += THREADS)
            if (source.take(i, key) && (key >> high) == prefix)
                atomicAdd(&histogram[(int)(key >> low) & ((1 << (high - low)) - 1)], 1);
        __syncthreads();
        choose(histogram, need, partial, &choice);
        if (done == 0 && choice.total <= need) { all = true; break; }
        need -= choice.above;
        inside = choice.inside;
        prefix = (prefix << (high - low)) | (u64)choice.bin;
        ++done;
        all = inside == need;
        __syncthreads();
    }

    // One pass hands out what is decided and keeps the undecided rest in shared memory.
    {
        int shift = digit_shift(done);
        u64 key;
        for (int i = tid; i < n; i += THREADS) {
            if (!source.take(i, key)) continue;
            u64 head = key >> shift;
            if (head > prefix || (all && head == prefix)) chosen[atomicAdd(&chosen_count, 1)] = i;
            else if (head == prefix) buffer[atomicAdd(&buffered, 1)] = key;
        }
    }
    __syncthreads();
    while (!all) {
        int high = digit_shift(done), low = digit_shift(done + 1);
        for (int b = tid; b < BINS; b += THREADS) histogram[b] = 0;
        __syncthreads();
        for (int i = tid; i < buffered; i += THREADS)
            if ((buffer[i] >> high) == prefix)
                atomicAdd(&histogram[(int)(buffer[i] >> low) & ((1 << (high - low)) - 1)], 1);
        __syncthreads();
        choose(histogram, need, partial, &choice);
        need -= choice.above;
        prefix = (prefix << (high - low)) | (u64)choice.bin;
        ++done;
        all = choice.inside == need || done == 5;
        __syncthreads();
        if (all) {
            int shift = digit_shift(done);
            for (int i = tid; i < buffered; i += THREADS)
                if ((buffer[i] >> shift) >= prefix)
                    chosen[atomicAdd(&chosen_count, 1)] = source.index_of(buffer[i]);
            __syncthreads();
        }
    }
    const int count = chosen_count;

    if (bit_words) {
        u32* words = (u32*)buffer;  // 2 * CAPACITY words at a time
        for (int first = 0; first < bit_words; first += 2 * CAPACITY) {
            int here = min(2 * CAPACITY, bit_words - first);
            __syncthreads();
            for (int w = tid; w < here; w += THREADS) words[w] = 0;
            __syncthreads();
            for (int i = tid; i < count; i += THREADS) {
                int w = (chosen[i] >> 5) - first;
                if (w >= 0 && w < here) atomicOr(&words[w], 1u << (chosen[i] & 31));
            }
            __syncthreads();
            for (int w = tid; w < here; w += THREADS) bits[(long long)row * bit_words + first + w] = words[w];
        }
        return;
    }
    int size = 1;
    while (size < k) size <<= 1;
    for (int i = tid; i < size; i += THREADS)
        if (i >= count) chosen[i] = 0x7fffffff;
    for (int span = 2; span <= size; span <<= 1)
        for (int step = span >> 1; step > 0; step >>= 1) {
            __syncthreads();
            for (int i = tid; i < size; i += THREADS) {
                int j = i ^ step;
                if (j > i) {
                    int a = chosen[i], b = chosen[j];
                    if ((a > b) == ((i & span) == 0)) { chosen[i] = b; chosen[j] = a; }
                }
            }
        }
    __syncthreads();
    for (int i = tid; i < k; i += THREADS)
        indices[(long long)row * k + i] = i < count ? (long long)chosen[i] : -1;
}
