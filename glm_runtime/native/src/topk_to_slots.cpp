// Logical lists to cache addresses, through the block table. Contract: ops/topk_to_slots/reference.py.
#include "simd.hpp"

#ifdef GLM_SUPPORTED
// lists, addresses [num_rows, width]; block_tables [sequences, table_width]; counts [num_rows].
extern "C" void glm_topk_to_slots(const int64_t* lists, int64_t num_rows, int64_t width, const int64_t* row_sequences,
                                  const int64_t* block_tables, int64_t table_width, int64_t block_size, int64_t num_blocks,
                                  int64_t block_units, int64_t token_units, int64_t* addresses, int64_t* counts) {
#pragma omp parallel for schedule(static) if (num_rows * width > 4096)
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t* table = block_tables + row_sequences[row] * table_width;
        int64_t count = 0;
        for (int64_t i = row * width; i < (row + 1) * width; ++i) {
            const int64_t token = lists[i];
            int64_t address = -1;
            if (token >= 0 && token < table_width * block_size) {
                const int64_t in_table = int64_t(uint64_t(token) / uint64_t(block_size)), block = table[in_table];
                if (block >= 0 && block < num_blocks) address = block * block_units + (token - in_table * block_size) * token_units;
            }
            addresses[i] = address;
            count += address >= 0;
        }
        counts[row] = count;
    }
}
#endif
