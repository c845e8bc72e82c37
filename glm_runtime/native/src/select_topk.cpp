// Exact top-k of rows of scores. Contract: ops/select_topk/reference.py.
#include "scratch.hpp"
#include "topk.hpp"

#ifdef GLM_SUPPORTED
// scores [rows, row_stride] fp32, visible [rows], lists [rows, k].
extern "C" void glm_select_topk(const float* scores, int64_t rows, int64_t row_stride, const int64_t* visible, int64_t k, int64_t* lists) {
    using namespace glm;
#pragma omp parallel
    {
        thread_local Scratch memory;
        uint32_t* ranks = memory.take<uint32_t>(row_stride + 1);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < rows; ++row) {
            int64_t* list = lists + row * k;
            if (visible[row] <= k) {
                list_all(visible[row], k, list);
                continue;
            }
            rank_scores(scores + row * row_stride, visible[row], ranks);
            list_best(ranks, visible[row], k, list);
        }
    }
}
#endif
