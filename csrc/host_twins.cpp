// The arithmetic of csrc/include, compiled for the host, behind a C API that the CPU tests drive.
#include "include/sinkhorn.cuh"

namespace host {

struct Lanes {
    float at[16];
};

template <class F> inline Lanes each(F f) {
    Lanes out;
    for (int i = 0; i < 16; ++i) out.at[i] = f(i);
    return out;
}

inline Lanes operator+(Lanes a, Lanes b) { return each([&](int i) { return a.at[i] + b.at[i]; }); }
inline Lanes operator-(Lanes a, Lanes b) { return each([&](int i) { return a.at[i] - b.at[i]; }); }
inline Lanes operator/(Lanes a, Lanes b) { return each([&](int i) { return a.at[i] / b.at[i]; }); }
inline Lanes operator+(Lanes a, float b) { return each([&](int i) { return a.at[i] + b; }); }
inline Lanes exchange(Lanes a, int mask) { return each([&](int i) { return a.at[i ^ mask]; }); }
inline Lanes maximum(Lanes a, Lanes b) { return each([&](int i) { return fmaxf(a.at[i], b.at[i]); }); }
inline Lanes exponential(Lanes a) { return each([&](int i) { return expf(a.at[i]); }); }

}  // namespace host

// logits, out: fp32 [count, 4, 4]
extern "C" void dsv4_host_sinkhorn(const float *logits, float *out, long count, int iterations, float eps) {
    for (long i = 0; i < count; ++i) {
        host::Lanes v = host::each([&](int lane) { return logits[16 * i + lane]; });
        v = dsv4::sinkhorn(v, iterations, eps);
        for (int lane = 0; lane < 16; ++lane) out[16 * i + lane] = v.at[lane];
    }
}
