// Sinkhorn of mHC over a 4 x 4 matrix that lies in 16 lanes, lane = 4 n + m, for the host and the device.
//
// V is a value per lane: a float in a warp (16 lanes of it used), or host::Lanes, which holds all 16. Both provide
// exchange(v, mask): the value of lane ^ mask. Sums over a row are lanes ^1, ^2 and over a column lanes ^4, ^8, so every
// lane adds the same pairs and fp32 addition's commutativity makes the sums equal to the last bit.
#pragma once
#include <math.h>

#ifdef __CUDACC__
#define HD __device__ __forceinline__
#else
#define HD inline
#endif

namespace dsv4 {

template <class V> HD V sum_row(V v) {
    v = v + exchange(v, 1);
    return v + exchange(v, 2);
}

template <class V> HD V sum_column(V v) {
    v = v + exchange(v, 4);
    return v + exchange(v, 8);
}

template <class V> HD V max_row(V v) {
    v = maximum(v, exchange(v, 1));
    return maximum(v, exchange(v, 2));
}

// softmax over rows + eps, columns, then (rows, columns) iterations - 1 times; every sum + eps before it divides.
template <class V> HD V sinkhorn(V logits, int iterations, float eps) {
    V v = exponential(logits - max_row(logits));
    v = v / sum_row(v) + eps;
    v = v / (sum_column(v) + eps);
    for (int i = 1; i < iterations; ++i) {
        v = v / (sum_row(v) + eps);
        v = v / (sum_column(v) + eps);
    }
    return v;
}

}  // namespace dsv4
