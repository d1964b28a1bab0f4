// mHC: coefficients and collapse (dsv4_hc_pre), residual mix (dsv4_hc_post), and the head's collapse (dsv4_hyper_head).
//
// N = 4 streams of d channels (d a multiple of 8), K = 4 d; streams bf16 [T, 4, d], fn fp32 [rows, K]. Everything is fp32
// inside. The projection is split over K: each warp writes its partial sums to `work` and the finishing kernel adds them
// in a fixed order, so that no atomic decides the bits of a result. Tensors are contiguous and 16-byte aligned.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "include/sinkhorn.cuh"

namespace {

constexpr int N = 4;
constexpr int WARPS = 4;      // of a projecting CTA: they walk the same part of fn, which L1 then serves
constexpr int FINISH = 256;   // threads of a finishing or mixing CTA

struct Lane {  // one value of each thread of a warp, as sinkhorn.cuh wants it
    float at;
};
__device__ __forceinline__ Lane operator+(Lane a, Lane b) { return {a.at + b.at}; }
__device__ __forceinline__ Lane operator-(Lane a, Lane b) { return {a.at - b.at}; }
__device__ __forceinline__ Lane operator/(Lane a, Lane b) { return {__fdividef(a.at, b.at)}; }  // 2 ulp; 40 in a row
__device__ __forceinline__ Lane operator+(Lane a, float b) { return {a.at + b}; }
__device__ __forceinline__ Lane exchange(Lane v, int mask) { return {__shfl_xor_sync(0xffffffffu, v.at, mask)}; }
__device__ __forceinline__ Lane maximum(Lane a, Lane b) { return {fmaxf(a.at, b.at)}; }
__device__ __forceinline__ Lane exponential(Lane a) { return {expf(a.at)}; }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

union Eight {
    uint4 raw;
    __nv_bfloat162 pair[4];
    __device__ __forceinline__ void to(float (&out)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 f = __bfloat1622float2(pair[i]);
            out[2 * i] = f.x, out[2 * i + 1] = f.y;
        }
    }
    __device__ __forceinline__ void from(const float (&in)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
    }
};

// work[split][t][ROWS + 1]: partial fn @ x by row, then the partial sum of squares. A warp takes TOKENS tokens.
template <int ROWS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS)
project(const __nv_bfloat16 *__restrict__ x, const float *__restrict__ fn, float *__restrict__ work, int T, int K,
        int chunk) {
    const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * TOKENS;
    const int begin = blockIdx.y * chunk, end = min(K, begin + chunk);
    if (first >= T) return;
    float sum[TOKENS][ROWS] = {}, square[TOKENS] = {};
    for (int k = begin + 8 * lane; k < end; k += 8 * 32) {
        float v[TOKENS][8];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            Eight e;
            const int token = min(first + t, T - 1);  // past the end: a repeated token whose sums are not stored
            e.raw = __ldg(reinterpret_cast<const uint4 *>(x + size_t(token) * K + k));
            e.to(v[t]);
#pragma unroll
            for (int i = 0; i < 8; ++i) square[t] = fmaf(v[t][i], v[t][i], square[t]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 *row = reinterpret_cast<const float4 *>(fn + size_t(r) * K + k);
            const float4 a = __ldg(row), b = __ldg(row + 1);
            const float w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[t][r] = fmaf(w[i], v[t][i], sum[t][r]);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float *out = work + (size_t(blockIdx.y) * T + first + t) * (ROWS + 1);
#pragma unroll
        for (int r = 0; r <= ROWS; ++r) {
            float s = r < ROWS ? sum[t][r < ROWS ? r : 0] : square[t];
#pragma unroll
            for (int mask = 16; mask; mask /= 2) s += __shfl_xor_sync(0xffffffffu, s, mask);
            if (lane == 0 && first + t < T) out[r] = s;
        }
    }
}

// One token a CTA row; blockIdx.y is a slice of d. post and comb are null for the head (ROWS = 4).
template <int ROWS>
__global__ void __launch_bounds__(FINISH)
finish(const __nv_bfloat16 *__restrict__ x, const float *__restrict__ work, const float *__restrict__ base,
       const float *__restrict__ scale, float *__restrict__ pre, float *__restrict__ post, float *__restrict__ comb,
       __nv_bfloat16 *__restrict__ collapsed, int T, int d, int splits, int iterations, float hc_eps, float rms_eps) {
    __shared__ float z[ROWS + 1];
    const int t = blockIdx.x, lane = threadIdx.x, K = N * d;
    if (lane <= ROWS) {
        float s = 0.0f;
        for (int p = 0; p < splits; ++p) s += work[(size_t(p) * T + t) * (ROWS + 1) + lane];
        z[lane] = s;
    }
    __syncthreads();
    const float inverse = 1.0f / sqrtf(z[ROWS] / float(K) + rms_eps);
    float weight[N];
#pragma unroll
    for (int n = 0; n < N; ++n) weight[n] = sigmoid(z[n] * inverse * scale[0] + base[n]) + hc_eps;
    if (blockIdx.y == 0 && lane < 32) {
        if (lane < N) pre[size_t(t) * N + lane] = weight[lane];
        if (ROWS > N) {
            if (lane < N)
                post[size_t(t) * N + lane] = 2.0f * sigmoid(z[(N + lane) % ROWS] * inverse * scale[1] + base[N + lane]);
            const int at = (2 * N + lane % 16) % ROWS;  // both halves of the warp do the same, the first one stores
            const Lane v = dsv4::sinkhorn(Lane{z[at] * inverse * scale[2] + base[at]}, iterations, hc_eps);
            if (lane < 16) comb[size_t(t) * 16 + lane] = v.at;
        }
    }
    const __nv_bfloat16 *from = x + size_t(t) * K;
    for (int c = 8 * (blockIdx.y * FINISH + lane); c < d; c += 8 * FINISH * gridDim.y) {
        float sum[8] = {}, v[8];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            Eight e;
            e.raw = __ldg(reinterpret_cast<const uint4 *>(from + size_t(n) * d + c));
            e.to(v);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight[n], v[i], sum[i]);
        }
        Eight out;
        out.from(sum);
        *reinterpret_cast<uint4 *>(collapsed + size_t(t) * d + c) = out.raw;
    }
}

// streams'[m] = post[m] * out + sum_n comb[n, m] streams[n]
__global__ void __launch_bounds__(FINISH)
mix(const __nv_bfloat16 *__restrict__ streams, const float *__restrict__ post, const float *__restrict__ comb,
    const __nv_bfloat16 *__restrict__ out, __nv_bfloat16 *__restrict__ result, int d) {
    const size_t t = blockIdx.x;
    const int c = 8 * (blockIdx.y * FINISH + threadIdx.x);
    if (c >= d) return;
    float s[N][8], o[8];
    Eight e;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        e.raw = __ldg(reinterpret_cast<const uint4 *>(streams + (t * N + n) * d + c));
        e.to(s[n]);
    }
    e.raw = __ldg(reinterpret_cast<const uint4 *>(out + t * d + c));
    e.to(o);
#pragma unroll
    for (int m = 0; m < N; ++m) {
        float v[8];
        const float gain = post[t * N + m];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = gain * o[i];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float c_nm = comb[t * N * N + n * N + m];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = fmaf(c_nm, s[n][i], v[i]);
        }
        e.from(v);
        *reinterpret_cast<uint4 *>(result + (t * N + m) * d + c) = e.raw;
    }
}

template <int ROWS>
int run_pre(const void *x, const float *fn, const float *base, const float *scale, float *work, float *pre, float *post,
            float *comb, void *collapsed, int T, int d, int splits, int iterations, float hc_eps, float rms_eps,
            cudaStream_t stream) {
    const auto *in = static_cast<const __nv_bfloat16 *>(x);
    const int K = N * d, chunk = (K / 8 + splits - 1) / splits * 8;
    if (T <= 16) {
        project<ROWS, 1><<<dim3((T + WARPS - 1) / WARPS, splits), 32 * WARPS, 0, stream>>>(in, fn, work, T, K, chunk);
    } else {
        constexpr int TOKENS = 4;
        const int grid = (T + WARPS * TOKENS - 1) / (WARPS * TOKENS);
        project<ROWS, TOKENS><<<dim3(grid, splits), 32 * WARPS, 0, stream>>>(in, fn, work, T, K, chunk);
    }
    if (const int error = cudaGetLastError()) return error;
    const int slices = T >= 132 ? 1 : (d + 8 * FINISH - 1) / (8 * FINISH);
    finish<ROWS><<<dim3(T, slices), FINISH, 0, stream>>>(in, work, base, scale, pre, post, comb,
                                                         static_cast<__nv_bfloat16 *>(collapsed), T, d, splits,
                                                         iterations, hc_eps, rms_eps);
    return cudaGetLastError();
}

}  // namespace

extern "C" {

const char *dsv4_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// work: fp32 [splits, T, 25]
int dsv4_hc_pre(const void *x, const float *fn, const float *base, const float *scale, float *work, float *pre,
                float *post, float *comb, void *collapsed, int T, int d, int splits, int iterations, float hc_eps,
                float rms_eps, void *stream) {
    return run_pre<24>(x, fn, base, scale, work, pre, post, comb, collapsed, T, d, splits, iterations, hc_eps, rms_eps,
                       static_cast<cudaStream_t>(stream));
}

// work: fp32 [splits, T, 5]
int dsv4_hyper_head(const void *x, const float *fn, const float *base, const float *scale, float *work, float *pre,
                    void *collapsed, int T, int d, int splits, float hc_eps, float rms_eps, void *stream) {
    return run_pre<4>(x, fn, base, scale, work, pre, nullptr, nullptr, collapsed, T, d, splits, 0, hc_eps, rms_eps,
                      static_cast<cudaStream_t>(stream));
}

int dsv4_hc_post(const void *streams, const float *post, const float *comb, const void *out, void *result, int T, int d,
                 void *stream) {
    mix<<<dim3(T, (d + 8 * FINISH - 1) / (8 * FINISH)), FINISH, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const __nv_bfloat16 *>(streams), post, comb, static_cast<const __nv_bfloat16 *>(out),
        static_cast<__nv_bfloat16 *>(result), d);
    return cudaGetLastError();
}
}
