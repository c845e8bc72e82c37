// Drives libllama with forced tokens: the peer's side of the protocol that engine_process.py describes, one line a command.
//
// llama_driver MODEL.gguf f32|f16|bf16 THREADS, the second being the type of the cache. Every sequence has a stream of its own
// (kv_unified off), so that a context copied to sixteen sequences is read sixteen times, as sixteen users' would be.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr int kBatchTokens = 2048;
constexpr int kSpareTokens = 64;  // room behind a filled context for the tokens of one measurement

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

ggml_type cache_type(const std::string &name) {
    if (name == "f32") return GGML_TYPE_F32;
    if (name == "f16") return GGML_TYPE_F16;
    if (name == "bf16") return GGML_TYPE_BF16;
    throw std::runtime_error("unknown type of cache " + name);
}

class Driver {
public:
    Driver(const char *path, const std::string &type, int threads) : type_(cache_type(type)), threads_(threads) {
        llama_model_params params = llama_model_default_params();
        params.load_mtp = false;
        model_ = llama_model_load_from_file(path, params);
        if (model_ == nullptr) throw std::runtime_error("the model could not be loaded");
        vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    }

    std::vector<float> log_probs(const std::vector<llama_token> &tokens) {
        renew(tokens.size(), 1);
        feed(tokens);
        const float *logits = llama_get_logits_ith(context_, -1);
        double largest = *std::max_element(logits, logits + vocabulary_), total = 0;
        for (int i = 0; i < vocabulary_; ++i) total += std::exp(logits[i] - largest);
        std::vector<float> result(vocabulary_);
        for (int i = 0; i < vocabulary_; ++i) result[i] = static_cast<float>(logits[i] - largest - std::log(total));
        return result;
    }

    double prefill(const std::vector<llama_token> &tokens) {
        renew(tokens.size(), 1);
        const double started_s = now_s();
        feed(tokens);
        best_token(-1);
        return now_s() - started_s;
    }

    void fill(int batch, const std::vector<llama_token> &tokens) {
        renew(tokens.size(), batch);
        feed(tokens);
        for (int sequence = 1; sequence < batch; ++sequence) llama_memory_seq_cp(llama_get_memory(context_), 0, sequence, -1, -1);
        filled_ = static_cast<int>(tokens.size());
        batch_ = batch;
    }

    // `tokens` holds the batch's tokens of step 0, then of step 1, and so on. The context is as it was when it returns.
    std::vector<float> decode(const std::vector<llama_token> &tokens) {
        if (batch_ == 0 || tokens.size() % batch_ != 0) throw std::runtime_error("decode needs a filled context and whole steps");
        if (tokens.size() / batch_ > kSpareTokens) throw std::runtime_error("more steps than there is room for");
        std::vector<float> seconds;
        llama_batch batch = llama_batch_init(batch_, 0, 1);
        for (size_t step = 0; step < tokens.size() / batch_; ++step) {
            const double started_s = now_s();
            batch.n_tokens = 0;
            for (int sequence = 0; sequence < batch_; ++sequence) {
                add(batch, tokens[step * batch_ + sequence], filled_ + static_cast<int>(step), sequence, true);
            }
            run(batch);
            for (int row = 0; row < batch_; ++row) best_token(row);
            seconds.push_back(static_cast<float>(now_s() - started_s));
        }
        llama_batch_free(batch);
        for (int sequence = 0; sequence < batch_; ++sequence) llama_memory_seq_rm(llama_get_memory(context_), sequence, filled_, -1);
        return seconds;
    }

private:
    static void add(llama_batch &batch, llama_token token, int position, int sequence, bool wants_logits) {
        const int row = batch.n_tokens++;
        batch.token[row] = token;
        batch.pos[row] = position;
        batch.n_seq_id[row] = 1;
        batch.seq_id[row][0] = sequence;
        batch.logits[row] = wants_logits;
    }

    void renew(size_t context, int batch) {
        if (context_ != nullptr) llama_free(context_);
        llama_context_params params = llama_context_default_params();
        params.n_ctx = static_cast<uint32_t>((context + kSpareTokens) * batch);
        params.n_batch = kBatchTokens;
        params.n_seq_max = batch;
        params.n_threads = params.n_threads_batch = threads_;
        params.type_k = params.type_v = type_;
        params.kv_unified = false;
        context_ = llama_init_from_model(model_, params);
        if (context_ == nullptr) throw std::runtime_error("the context could not be made");
        batch_ = 0;
    }

    void feed(const std::vector<llama_token> &tokens) {
        llama_batch batch = llama_batch_init(kBatchTokens, 0, 1);
        for (size_t start = 0; start < tokens.size(); start += kBatchTokens) {
            batch.n_tokens = 0;
            for (size_t i = start; i < std::min(tokens.size(), start + kBatchTokens); ++i) {
                add(batch, tokens[i], static_cast<int>(i), 0, i + 1 == tokens.size());
            }
            run(batch);
        }
        llama_batch_free(batch);
    }

    void run(const llama_batch &batch) {
        const int code = llama_decode(context_, batch);
        if (code != 0) throw std::runtime_error("llama_decode returned " + std::to_string(code));
        llama_synchronize(context_);
    }

    // Greedy sampling, which the other engines' steps include too.
    void best_token(int row) {
        const float *logits = llama_get_logits_ith(context_, row);
        drawn_ += std::max_element(logits, logits + vocabulary_) - logits;
    }

    ggml_type type_;
    int threads_;
    llama_model *model_ = nullptr;
    llama_context *context_ = nullptr;
    int vocabulary_ = 0;
    int filled_ = 0;
    int batch_ = 0;
    long drawn_ = 0;
};

void answer(const std::vector<float> &values) {
    std::printf("ok");
    for (float value : values) std::printf(" %.8g", value);
    std::printf("\n");
}

std::vector<float> obey(Driver &driver, const std::string &line) {
    std::istringstream words(line);
    std::string command;
    int batch = 1;
    words >> command;
    if (command == "fill") words >> batch;
    std::vector<llama_token> tokens;
    for (llama_token token; words >> token;) tokens.push_back(token);
    if (command == "log_probs") return driver.log_probs(tokens);
    if (command == "prefill") return {static_cast<float>(driver.prefill(tokens))};
    if (command == "decode") return driver.decode(tokens);
    if (command != "fill") throw std::runtime_error("unknown command " + command);
    driver.fill(batch, tokens);
    return {};
}

void log_only_errors(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: llama_driver MODEL.gguf f32|f16|bf16 THREADS\n");
        return 2;
    }
    llama_log_set(log_only_errors, nullptr);
    llama_backend_init();
    try {
        Driver driver(argv[1], argv[2], std::stoi(argv[3]));
        answer({});
        std::fflush(stdout);
        for (std::string line; std::getline(std::cin, line);) {
            try {
                answer(obey(driver, line));
            } catch (const std::exception &error) {
                std::printf("error %s\n", error.what());
            }
            std::fflush(stdout);
        }
    } catch (const std::exception &error) {
        std::printf("error %s\n", error.what());
        return 1;
    }
    return 0;
}
